"""Make the packages in `stubs/` importable once `sglang` is first imported.

Uses the standard library only and is also loaded by path, in processes where its package may not be importable.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_STUBS = str(Path(__file__).resolve().parent / "stubs")


def install() -> None:
    """Wait for the first import of sglang. A second call does nothing."""
    if not installed():
        sys.meta_path.insert(0, _Stubs())


def installed() -> bool:
    """Return True when `install` was called in this process, by any copy of this module."""
    # By name: the class in sitecustomize's copy is another class.
    return any(type(finder).__name__ == _Stubs.__name__ for finder in sys.meta_path)


class _Stubs(importlib.abc.MetaPathFinder):
    """Asked first until sglang is imported, and finds nothing; asked last from then on, so that a real package wins.

    Not an entry of sys.path: multiprocessing hands that to every process it starts, whatever it is for.
    """

    def __init__(self) -> None:
        self.waiting = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.waiting:
            return PathFinder.find_spec(fullname, [_STUBS]) if path is None else None
        if fullname == "sglang":
            _ask_what_is_really_here()
            self.waiting = False
            sys.meta_path.remove(self)
            sys.meta_path.append(self)
        return None


def _ask_what_is_really_here() -> None:
    """Let torch and transformers look for what the stubs will imitate. They look once and remember the answer."""
    import torch._inductor.runtime.triton_compat  # torch.compile for a CPU would otherwise meet the stub of triton
    import torch.utils._triton
    from transformers.utils import import_utils

    torch.utils._triton.has_triton_package()
    import_utils.is_triton_available()
    import_utils.is_torchvision_available()
