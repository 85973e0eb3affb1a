"""Adapters of linear layers: a hook that adds `scale * B (A x)` to the output, whatever class computes the layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.model.tensor_parallel import (
    ColwiseGatheringLinear,
    ColwiseLinear,
    RowwiseLinear,
    RowwiseSplittingLinear,
    reduce_from,
)

Product = Callable[[Tensor, Tensor], Tensor]  # x [..., D] and a weight [V, D] give [..., V]


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

    def install(self, a: Tensor, b: Tensor, *, scale: float, is_on: Callable[[], bool]) -> None:
        change = self._change(a, b)

        def add_change(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            return output + change(*inputs) * scale if is_on() else None

        self.layer.register_forward_hook(add_change)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return b @ a

    def _change(self, a: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
        """Return x -> B (A x), of this rank's part where the layer is split.

        The ranks' gradients of A and B are summed over tp as well: each contributes its part, or an nth of what all n
        of them compute.
        """
        layer, tp = self.layer, self.tp
        if tp is None:
            return lambda x: self._low_rank(x, a, b)
        if isinstance(layer, ColwiseLinear) and not isinstance(layer, ColwiseGatheringLinear):
            return lambda x: self._low_rank(layer.shared_copy(x), a, _part(b, tp, 0))
        count_once(b, tp)
        if isinstance(layer, RowwiseLinear) and not isinstance(layer, RowwiseSplittingLinear):
            return lambda x: self._product(reduce_from(self._product(x, _part(a, tp, 1)), tp), b)
        count_once(a, tp)
        return lambda x: self._low_rank(x, a, b)

    def _low_rank(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self._product(self._product(x, a), b)

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
