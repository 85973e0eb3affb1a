"""Adapters of experts, whose weights are one parameter: A and B of all experts of a layer have one shape, side by side.

A forward pass computes with the weights that adapters change: W + scale * B A of this rank's part, in the dtype of W.
So every kernel of experts can have adapters, and the trainer computes with the very weights that a merged refit gives
to the engine. It costs the memory of a layer's experts and the time of their weights' gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from spmdrl.model.checkpointing import cheap_products
from spmdrl.model.low_rank import Pair, count_once
from spmdrl.model.tensor_parallel import own_weight, parameters_as


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
        assert pair.start is None, "adapters of experts begin at 0"
        a, b = pair.a, pair.b
        count, name = self.weight_shape[0], self._name
        part = self._part()
        compute = self.experts.forward
        if part is None and self.tp is not None:
            count_once(a, self.tp)
            count_once(b, self.tp)

        def changed(weight: Tensor) -> Tensor:
            held = own_weight(weight)
            each_a, each_b = _of_each(a, b, count) if part is None else part(*_of_each(a, b, count))
            return held + (scale * self._multiply(each_a, each_b)).to(held.dtype)

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
