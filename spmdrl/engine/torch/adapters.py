"""Adapters in the torch engine: several versions at once, and for each row those of its own request."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmdrl.model.lora.adapters import PREFIX, matrix_names
from spmdrl.model.lora.layers import ExpertsTarget, WeightProduct
from spmdrl.model.lora.targets import targets_of
from spmdrl.model.tensor_parallel import parameters_as
from spmdrl.refit.bucket import AdapterVersion


class AdapterBank:
    """The adapters of all loaded versions, on the linear layers and the experts of a model."""

    def __init__(self, model: PreTrainedModel, product: WeightProduct) -> None:
        """`product` is how the model's linear layers multiply."""
        self._model, self._product, self._device = model, product, model.device
        self._layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
        self._hooks: dict[str, Any] = {}
        self._by_row: set[nn.Module] = set()  # modules of experts that are computed with their rows' weights
        self._loaded: dict[int, _LoadedAdapters] = {}  # by version
        self._chosen: list[tuple[RowIndex, _LoadedAdapters]] = []  # disjoint rows of the next pass, and their adapters

    @property
    def versions(self) -> Collection[int]:
        return self._loaded.keys()

    def load(self, adapters: AdapterVersion) -> AdapterVersion:
        """Copy the adapters of a version; return the copies. The model's weights are those that they change."""
        own = dataclasses.replace(adapters, flat=adapters.flat.to(self._device, copy=True))
        tensors = own.tensors
        stems = (name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight"))
        pairs = {
            layer: (tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"])
            for stem in stems
            if (layer := stem.removeprefix(PREFIX)) in self._layers
        }
        parameters = adapters.config.get("target_parameters") or ()
        experts = merged_experts(self._model, tensors, parameters, scale=adapters.scale)
        self._loaded[adapters.version] = _LoadedAdapters(pairs, adapters.scale, experts)
        for name in pairs.keys() - self._hooks.keys():
            self._hooks[name] = self._layers[name].register_forward_hook(self._hook(name))
        for module in experts.keys() - self._by_row:
            compute_by_row(module, self._experts_of_rows)
            self._by_row.add(module)
        return own

    def drop(self, version: int) -> None:
        del self._loaded[version]

    def choose(self, runs: Iterable[tuple[int, int]]) -> None:
        """Choose the adapters of each row in the next forward pass, given runs of rows: their version and how many.

        Rows of a version that has none are computed by the base alone.
        """
        # Most engines have no adapters, and this is called for every token.
        versions = _rows_by_version(runs) if self._loaded else ()
        self._chosen = [(rows, self._loaded[version]) for version, rows in versions if version in self._loaded]

    def add_to(self, y: Tensor, x: Tensor, layers: tuple[str, ...]) -> Tensor:
        """Add what the chosen adapters make of x [n, D] to y [n, V], the outputs of these layers side by side."""
        for rows, adapters in self._chosen:
            if (pair := adapters.side_by_side(layers, self._layers)) is not None:
                a, b = pair
                y[rows] += self._product(self._product(x[rows], a), b) * adapters.scale
        return y

    def _experts_of_rows(self, module: nn.Module) -> list[tuple[RowIndex, ExpertWeights]]:
        return [(rows, one.experts[module]) for rows, one in self._chosen if module in one.experts]

    def _hook(self, name: str) -> Callable[..., Tensor]:
        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = inputs[0].flatten(0, -2)
            return self.add_to(output.flatten(0, -2), x, (name,)).view_as(output)

        return add


class _LoadedAdapters:
    """The adapters of one version."""

    def __init__(
        self, pairs: dict[str, tuple[Tensor, Tensor]], scale: float, experts: Mapping[nn.Module, ExpertWeights]
    ) -> None:
        self._pairs, self.scale, self.experts = pairs, scale, experts
        self._joined: dict[tuple[str, ...], tuple[Tensor, Tensor] | None] = {}

    def side_by_side(self, names: tuple[str, ...], layers: dict[str, nn.Linear]) -> tuple[Tensor, Tensor] | None:
        """Return A [R, D] and B [V, R] of layers with the same input whose outputs lie side by side; None where none
        of them has an adapter."""
        if len(names) == 1:
            return self._pairs.get(names[0])
        if names not in self._joined:
            self._joined[names] = self._join(names, layers)
        return self._joined[names]

    def _join(self, names: tuple[str, ...], layers: dict[str, nn.Linear]) -> tuple[Tensor, Tensor] | None:
        found = [self._pairs.get(name) for name in names]
        if not any(found):
            return None
        blocks = [
            pair[1] if pair is not None else layers[name].weight.new_zeros(len(layers[name].weight), 0)
            for name, pair in zip(names, found, strict=True)
        ]
        return torch.cat([pair[0] for pair in found if pair is not None]), torch.block_diag(*blocks)


def _rows_by_version(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, RowIndex]]:
    """Yield each version with its rows."""
    places: dict[int, list[range]] = {}
    start = 0
    for version, run in itertools.groupby(runs, key=lambda run: run[0]):
        end = start + sum(length for _, length in run)
        places.setdefault(version, []).append(range(start, end))
        start = end
    for version, runs_of_version in places.items():
        yield (
            version,
            slice(runs_of_version[0].start, runs_of_version[0].stop)
            if len(runs_of_version) == 1
            else torch.tensor([row for run in runs_of_version for row in run]),
        )


# Adapters of experts: each row is computed with the experts of its own version.
#
# Experts are computed by kernels that take whole weights, so a version has its own: W + scale * B A, as the trainer
# has while it computes. They are made once, when the version is loaded.


RowIndex = slice | Tensor  # of a batch: a run of them, or their numbers [n] int64
ExpertWeights = Mapping[str, Tensor]  # the parameters of a module of experts that adapters change, by name


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


def compute_by_row(
    experts: nn.Module, chosen: Callable[[nn.Module], Collection[tuple[RowIndex, ExpertWeights]]]
) -> None:
    """Make a module of experts ask, in every forward pass, which rows have weights of their own; the others have the
    module's. Its inputs are tensors with a row for each token."""
    compute = experts.forward

    def compute_rows(inputs: Sequence[Tensor], rows: RowIndex, weights: ExpertWeights) -> Tensor:
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
