"""Adapters of linear layers: a hook that adds `scale * B (A x)` to the output, whatever class computes the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.model.checkpointing import cheap_products
from spmdrl.model.tensor_parallel import (
    ColwiseGatheringLinear,
    ColwiseLinear,
    RowwiseLinear,
    RowwiseSplittingLinear,
    reduce_from,
)

Product = Callable[[Tensor, Tensor], Tensor]  # x [..., D] and a weight [V, D] give [..., V]


@dataclass(frozen=True, slots=True)
class Pair:
    """The two matrices of an adapter, float32.

    With a `start`, A0 and B0, what is trained are differences from it, and the adapter adds B A - B0 A0 in place of
    B A: nothing at first, as if B0 A0 had been taken from the weight.
    """

    a: Tensor  # leaves, on which gradients arise
    b: Tensor
    start: tuple[Tensor, Tensor] | None = None

    def plain(self) -> tuple[Tensor, Tensor]:
        """Return the A and B whose product is what the adapter adds; with a start they have twice the rank.

        (A0 + a, B0 + b) are then the matrices that began as the start, and their product without B0 A0 is
        b (A0 + a) + B0 a. Both terms are exactly 0 as long as a and b are.
        """
        if self.start is None:
            return self.a, self.b
        a0, b0 = self.start
        return torch.cat([a0 + self.a, self.a]), torch.cat([self.b, b0], 1)


@dataclass(frozen=True, slots=True)
class LinearTarget:
    """A linear layer that gets an adapter; it may be split over `tp`."""

    module: str
    layer: nn.Linear
    multiply: Product  # the one that the layer multiplies by
    tp: DeviceMesh | None = None  # None: no other rank computes the same tokens

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return tuple(self.layer.weight.shape)  # of a DTensor: the whole's

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        outputs, inputs = self.weight_shape
        return (rank, inputs), (outputs, rank)

    def install(self, pair: Pair, *, scale: float, is_on: Callable[[], bool]) -> None:
        change = self._change(pair)

        def add_change(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return output + change(*inputs) * scale if is_on() else None

        self.layer.register_forward_hook(add_change)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return b @ a

    def _change(self, pair: Pair) -> Callable[[Tensor], Tensor]:
        """Return x -> B (A x), of this rank's part where the layer is split.

        The ranks' gradients of A and B are summed over tp as well: each contributes its part, or an nth of what all n
        of them compute.
        """
        layer, tp = self.layer, self.tp
        if tp is None:
            return lambda x: self._low_rank(x, *pair.plain())
        if isinstance(layer, ColwiseLinear) and not isinstance(layer, ColwiseGatheringLinear):
            return lambda x: self._of_own_rows(layer.shared_copy(x), *pair.plain(), tp)
        count_once(pair.b, tp)
        if isinstance(layer, RowwiseLinear) and not isinstance(layer, RowwiseSplittingLinear):
            return lambda x: self._of_own_columns(x, *pair.plain(), tp)
        count_once(pair.a, tp)
        return lambda x: self._low_rank(x, *pair.plain())

    def _of_own_rows(self, x: Tensor, a: Tensor, b: Tensor, tp: DeviceMesh) -> Tensor:
        return self._low_rank(x, a, _part(b, tp, 0))

    def _of_own_columns(self, x: Tensor, a: Tensor, b: Tensor, tp: DeviceMesh) -> Tensor:
        return self._widened(reduce_from(self._product(x, _part(a, tp, 1)), tp), b)

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self._widened(self._product(x, a), b)

    def _widened(self, x: Tensor, b: Tensor) -> Tensor:
        """Multiply what A has made of x with B; selective checkpointing keeps its narrow input, not its result."""
        with cheap_products():
            return self._product(x, b)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply x [..., D] with a weight [V, D] float32, in the dtype of x."""
        return self.multiply(x, weight.to(x.dtype))


def _part(matrix: Tensor, tp: DeviceMesh, dim: int) -> Tensor:
    """Return this rank's equal part of a matrix along `dim`."""
    return matrix.chunk(tp.size(), dim)[tp.get_local_rank()]


def count_once(leaf: Tensor, tp: DeviceMesh) -> None:
    """Divide the gradient of a matrix by the number of ranks that all compute the whole of it."""

    def share(gradient: Tensor) -> Any:
        return gradient / tp.size()

    leaf.register_hook(share)
