"""Twins in torch of the Triton kernels of spmdrl: whole runs need not wait for Triton's interpreter, nor have Triton.

Where `EMULATED_CUDA_PLAIN_KERNELS=1`, the modules of kernels are imported as these. No line of the package knows of it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

VARIABLE = "EMULATED_CUDA_PLAIN_KERNELS"


def _fused(module: ModuleType) -> None:
    from spmdrl.model import fused_plain

    vars(module).update({name: value for name, value in vars(fused_plain).items() if not name.startswith("__")})


def _logits_tile(module: ModuleType) -> None:
    from spmdrl.model import logits_tile

    vars(module).update(summary=logits_tile.summary, gradient=logits_tile.gradient)


def _digest(module: ModuleType) -> None:
    import torch

    from spmdrl.refit import digest

    def sums(weights: Sequence[Sequence[torch.Tensor]], **_table: int) -> torch.Tensor:
        return torch.tensor([digest._sums_on_host([part.cpu() for part in parts]) for parts in weights])

    vars(module).update(sums=sums)


_TWINS: dict[str, Callable[[ModuleType], None]] = {
    "spmdrl.model.fused_triton": _fused,
    "spmdrl.model.logits_tile_triton": _logits_tile,
    "spmdrl.refit.digest_triton": _digest,
}


class _Twins(Loader, MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname in _TWINS else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        _TWINS[module.__name__](module)


def install() -> None:
    """Let the twins be found before the kernels, where the variable asks for them."""
    if os.environ.get(VARIABLE) == "1":
        sys.meta_path.insert(0, _Twins())
