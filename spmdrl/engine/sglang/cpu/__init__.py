"""SGLang on machines without a GPU: the pinned release itself, on torch's CPU backend.

SGLang imports four packages that this backend never computes with, and that are large, built for CUDA, or both.
`stubs/` stands in for them. A stub must not be seen by anything else: to transformers or torch, a package that is
there is a package that works. So nothing is put into the virtual environment; a process that will run SGLang asks for
the stubs, and they appear when it first imports `sglang` (`on_import.py`):

- this process, by `enable()`;
- the processes that SGLang starts, by the `sitecustomize.py` that `child_environment()` puts on their path.

A real package, where there is one, is always found before its stub.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from spmdrl.engine.sglang.cpu import on_import

__all__ = ["child_environment", "enable", "startup_path"]

_STARTUP = Path(__file__).resolve().parent / "startup"

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
    return {"PYTHONPATH": startup_path(), **_VARIABLES}


def startup_path() -> str:
    """Return a PYTHONPATH with our `sitecustomize.py` before any other; on a GPU it ties them to their rank."""
    rest = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(_STARTUP)]
    return os.pathsep.join([str(_STARTUP), *rest])
