"""Modules of SGLang that pin host memory, on machines where that cannot be done: it needs an accelerator."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

_FACTORIES = ("arange", "empty", "tensor", "zeros")


def pin_nothing(*modules: ModuleType) -> None:
    """Let these modules make tensors without pinning them. Other modules keep torch's own factories: with those of the
    whole process replaced, SGLang computes something else in models with experts."""
    for module in modules:
        module.torch = _TorchWithoutPinning("torch")  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


class _TorchWithoutPinning(ModuleType):
    """torch, with factories that ignore `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in _FACTORIES:
            return found

        def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            return found(*arguments, **options)

        return made
