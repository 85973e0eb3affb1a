"""Layers with adapters: a hook that adds `scale * B (A x)` to the output of a linear layer, or to those of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from spmdrl.model.tensor_parallel import (
    ColwiseGatheringLinear,
    ColwiseLinear,
    LatentLinear,
    RowwiseLinear,
    RowwiseSplittingLinear,
    local_part,
    parameters_as,
    reduce_from,
)

# True inside `cheap_products`, which activation checkpointing reads.
is_cheap: ContextVar[bool] = ContextVar("is_cheap", default=False)


@contextmanager
def cheap_products() -> Iterator[None]:
    """Have "selective" repeat the products in this block instead of keeping their results.

    Those of low rank take little time, and their results as much memory as those of a whole weight.
    """
    before = is_cheap.set(True)
    try:
        yield
    finally:
        is_cheap.reset(before)


# Adapters of linear layers: a hook that adds `scale * B (A x)` to the output, whatever class computes the layer.


WeightProduct = Callable[[Tensor, Tensor], Tensor]  # x [..., D] and a weight [V, D] give [..., V]


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
    multiply: WeightProduct  # the one that the layer multiplies by
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
        """Add scale * B A x to the layer's output by a hook, so that the layer's own product stays as it is."""
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
        if isinstance(layer, LatentLinear):
            return lambda x: layer.for_heads(self._low_rank(x, *pair.plain()))
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


# Adapters of experts, whose weights are one parameter: A and B of all experts of a layer have one shape, side by
# side.
#
# A forward pass computes with the weights that adapters change: W + scale * B A of this rank's part, in the dtype of
# W. So every kernel of experts can have adapters, and the trainer computes with the very weights that a merged refit
# gives to the engine. It costs the memory of a layer's experts and the time of their weights' gradients.


@dataclass(frozen=True, slots=True)
class ExpertsTarget:
    """A parameter [experts, outputs, inputs] of a module of experts that gets an adapter, or one [experts, inputs,
    outputs]; it may be split over tp, or its experts over ep."""

    module: str
    weight: str
    experts: nn.Module
    tp: DeviceMesh | None = None  # None: no other rank computes the same tokens

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return tuple(self._parameter.shape)

    @property
    def _name(self) -> str:
        return self.weight.rpartition(".")[2]

    @property
    def _parameter(self) -> Tensor:
        return self.experts.get_parameter(self._name)

    @property
    def _is_transposed(self) -> bool:
        return bool(getattr(self.experts, "is_transposed", False))

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        count, outputs, inputs = self.weight_shape
        if self._is_transposed:
            outputs, inputs = inputs, outputs
        return (count * rank, inputs), (outputs, rank * count)

    def install(self, pair: Pair, *, scale: float, is_on: Callable[[], bool]) -> None:
        """Surround the experts' forward, which then computes with W + scale * B A of this rank's part."""
        assert pair.start is None, "adapters of experts begin at 0"
        a, b = pair.a, pair.b
        count, name = self.weight_shape[0], self._name
        part = self._part()
        compute = self.experts.forward
        if part is None and self.tp is not None:
            count_once(a, self.tp)
            count_once(b, self.tp)

        def changed(weight: Tensor) -> Tensor:
            own = local_part(weight)
            each_a, each_b = _of_each(a, b, count) if part is None else part(*_of_each(a, b, count))
            return own + (scale * self._multiply(each_a, each_b)).to(own.dtype)

        def forward(*inputs: Any, **options: Any) -> Any:
            if not is_on():
                return compute(*inputs, **options)
            ours = self.experts._parameters[name]
            with parameters_as(self.experts, lambda weight: changed(weight) if weight is ours else weight):
                return compute(*inputs, **options)

        self.experts.forward = forward

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return self._multiply(*_of_each(a, b, self.weight_shape[0]))

    def _multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply B [experts, outputs, rank] with A [experts, rank, inputs], in the order of the parameter's dims."""
        with cheap_products():
            return (b @ a).mT if self._is_transposed else b @ a

    def _part(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """Return the function that takes this rank's part of A and B of all experts; None where it has all of them."""
        parameter = self._parameter
        names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
        axis = next((axis for axis, name in enumerate(names) if name in ("tp", "ep")), None)
        if axis is None:
            return None
        assert isinstance(parameter, DTensor)
        mesh, placement = parameter.device_mesh[names[axis]], parameter.placements[axis]
        dim = placement.dim  # type: ignore[attr-defined]
        groups = int(placement.split_factor) if names[axis] == "tp" and isinstance(placement, _StridedShard) else 1
        splits_inputs = dim == (1 if self._is_transposed else 2)

        def own(matrices: Tensor, along: int) -> Tensor:
            runs = matrices.chunk(groups, along)
            return torch.cat([run.chunk(mesh.size(), along)[mesh.get_local_rank()] for run in runs], along)

        def part(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            if dim == 0:
                return own(a, 0), own(b, 0)
            return (own(a, 2), b) if splits_inputs else (a, own(b, 1))

        return part


def _of_each(a: Tensor, b: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """View A [experts x rank, inputs] and B [outputs, rank x experts], PEFT's, as those of each expert."""
    return a.view(count, -1, a.shape[1]), b.view(len(b), -1, count).permute(2, 0, 1)
