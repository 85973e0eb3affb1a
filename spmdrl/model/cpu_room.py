"""The door to `spmdrl.cpu`, the optional room with kernels for float32 on a CPU; no other file names it.

Where a computation on a CPU begins, its file asks here. Without the room everything is computed by torch's own kernels.
A run on CUDA devices never imports it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol, cast

from torch import Tensor, nn

from spmdrl.model.attention_layer import AttentionLayer, SeenKeys

_ROOM = "spmdrl.cpu"
# Attention within sequences of equal length, whose number is the argument after v: q [T, H, D], k and v [T, K, D] give
# [T, H, D].
EqualLengths = Callable[[Tensor, Tensor, Tensor, int, AttentionLayer], Tensor]


class CpuRoom(Protocol):
    """The functions of the room; each computes the same as the function of this package in whose place it is called."""

    fused: ModuleType  # as `model/fused_plain.py`, for tensors that it `serves`

    def agree(self, run: Any) -> AbstractContextManager[None]:
        """Choose the kernels of a run, on all of its ranks together, for as long as it is open."""

    def describe(self) -> dict[str, Any]:
        """Return the kernels in use, for machine.json."""

    def layers(self, model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
        """Yield the layers to be replaced, each with its new class."""

    def serves(self, *tensors: Tensor | None) -> bool:
        """Return True when functions in C are in use and take these tensors: `fused`, and attention to a cache."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `model.linear.linear`."""

    def outer(self, grad: Tensor, x: Tensor) -> Tensor:
        """Compute `model.linear.outer`."""

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], layer: AttentionLayer, equal_lengths: EqualLengths
    ) -> Tensor:
        """Attend within sequences, float32 and without sinks: q [T, H, D], k and v [T, K, D] give [T, H, D]."""

    def attend_to_cache(self, q: Tensor, keys: Tensor, values: Tensor, seen: SeenKeys, scale: float) -> Tensor:
        """Attend with the newest token of each row: q [n, H, D], keys and values [n, K, L, D] give [n, H, D]."""

    def attend_to_rows(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        first_row: int,
        seqlens: Sequence[int],
        earlier: Sequence[int],
        scale: float,
    ) -> Tensor:
        """Attend with the last tokens of rows of a cache to all of each row: q [T, H, D] gives [T, H, D]."""

    def decoder(self, model: Any, adapters: Any) -> Callable[..., Tensor] | None:
        """Return a faster decoder for the torch engine's model; None for a model that it does not know."""


@functools.cache
def cpu_room() -> CpuRoom | None:
    """Import the room; None where it is not installed. Ask only for what is computed on a CPU."""
    if importlib.util.find_spec(_ROOM) is None:
        return None
    return cast(CpuRoom, importlib.import_module(_ROOM))
