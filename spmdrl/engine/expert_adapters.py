"""Adapters of experts in the torch engine: each row is computed with the experts of its own version.

Experts are computed by kernels that take whole weights, so a version has its own: W + scale * B A, as the trainer has
while it computes. They are made once, when the version is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmdrl.model.adapters import matrix_names
from spmdrl.model.expert_adapters import ExpertsTarget
from spmdrl.model.targets import targets_of
from spmdrl.model.tensor_parallel import parameters_as

Rows = slice | Tensor  # of a batch: a run of them, or their numbers [n] int64
Weights = Mapping[str, Tensor]  # the parameters of a module of experts that adapters change, by name


@torch.no_grad()
def merged_experts(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], parameters: Sequence[str], *, scale: float
) -> dict[nn.Module, dict[str, Tensor]]:
    """Make the weights of each module of experts whose `parameters`, given by the ends of their names, have adapters
    among `tensors`, which are given by PEFT's names."""
    merged: dict[nn.Module, dict[str, Tensor]] = {}
    for target in targets_of(model, parameters):
        if isinstance(target, ExpertsTarget):
            a, b = (tensors[name].float() for name in matrix_names(target))
            weight = model.get_parameter(target.weight)
            changed = weight + (scale * target.product(a, b)).to(weight.dtype)
            merged.setdefault(target.experts, {})[target.weight.rpartition(".")[2]] = changed
    return merged


def compute_by_row(experts: nn.Module, chosen: Callable[[nn.Module], Collection[tuple[Rows, Weights]]]) -> None:
    """Make a module of experts ask, in every forward pass, which rows have weights of their own; the others have the
    module's. Its inputs are tensors with a row for each token."""
    compute = experts.forward

    def compute_rows(inputs: Sequence[Tensor], rows: Rows, weights: Weights) -> Tensor:
        changed = {id(experts.get_parameter(name)): weight for name, weight in weights.items()}
        with parameters_as(experts, lambda weight: changed.get(id(weight), weight)):
            return compute(*(x[rows] for x in inputs))

    def forward(*inputs: Tensor) -> Any:
        parts = chosen(experts)
        if not parts:
            return compute(*inputs)
        outputs, is_left = torch.empty_like(inputs[0]), torch.ones(len(inputs[0]), dtype=torch.bool)
        for rows, weights in parts:
            outputs[rows] = compute_rows(inputs, rows, weights)
            is_left[rows] = False
        if is_left.any():
            left = is_left.nonzero()[:, 0]
            outputs[left] = compute_rows(inputs, left, {})
        return outputs

    experts.forward = forward
