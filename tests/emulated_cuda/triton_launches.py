"""Triton's interpreter on the emulated device: its launches are counted, and its pointers are of the current device."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .bindings import core


def install(interpreter: ModuleType) -> None:
    """Wrap the launch of a kernel; the interpreter copies its tensors to the host and back."""
    call = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        core().triton_launch(self.fn.__name__, tensors)
        # The interpreter's own copies are none of the program's.
        hosts = {id(x): core().host(x) for x in tensors}
        given = [hosts.get(id(x), x) for x in args]
        return call(self, *given, **{name: hosts.get(id(x), x) for name, x in kwargs.items()})

    interpreter.GridExecutor.__call__ = counted
