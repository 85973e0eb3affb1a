"""SGLang on machines without a GPU: the pinned release itself, on torch's CPU backend. It knows nothing of spmdrl.

SGLang imports four packages that this backend never computes with, and that are large, built for CUDA, or both.
`stubs/` stands in for them. A stub must not be seen by anything else: to transformers or torch, a package that is
there is a package that works. So nothing is put into the virtual environment; a process that will run SGLang asks for
the stubs, and they appear when it first imports `sglang` (`on_import.py`):

- this process, by `enable()`;
- the processes that SGLang starts, when they start with the variables of `child_environment()`: spmdrl's
  `sitecustomize.py` runs the file that `ON_IMPORT_VARIABLE` names.

A real package, where there is one, is always found before its stub.
"""

from __future__ import annotations

import os
import sys

from spmdrl_sglang_cpu import on_import
from spmdrl_sglang_cpu.pinning import pin_nothing
from spmdrl_sglang_cpu.processor import without_torchvision

__all__ = ["child_environment", "enable", "pin_nothing", "without_torchvision"]

ON_IMPORT_VARIABLE = "SPMDRL_SGLANG_CPU"

_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",  # without it SGLang looks for an accelerator and finds none
    "OMP_NUM_THREADS": "1",  # threads of several processes on the same cores wait for each other
}


def enable() -> None:
    """Make `import sglang` work in this process. Call it before the first such import; a second call does nothing."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = _VARIABLES["SGLANG_USE_CPU_ENGINE"]
    assert on_import.installed() or "sglang" not in sys.modules, "enable() must come before `import sglang`"
    on_import.install()


def child_environment() -> dict[str, str]:
    """Return the environment variables that the processes started by `Engine(...)` need."""
    return {ON_IMPORT_VARIABLE: on_import.__file__, **_VARIABLES}
