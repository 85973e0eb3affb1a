"""The replacement of a model's layers by ours: one list, in the order in which it happens.

No other file gives a module another class. A file that has layers of its own yields pairs of a module and its new
class, and may turn the module's parameters into parts before; what a later row finds is what earlier rows have left.

Some modules then have a `forward` of their own around that of the class that they had, from the inside out:
`model/tensor_parallel.py` and `model/experts.py`, in the row of split layers; around experts with adapters
`model/lora/layers.py`, or in the torch engine `engine/torch/adapters.py`; and around routers, whose layers are final,
`model/routes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from spmdrl.config.model import QuantizedBase
from spmdrl.dist.mesh import ModelMeshes
from spmdrl.model.experts import joining_experts
from spmdrl.model.lora.quantized import quantized_layers
from spmdrl.model.operators import Operators
from spmdrl.model.recurrent import packed_layers
from spmdrl.model.rotary import layers_by_length
from spmdrl.model.split import split_layers

Replaced = Iterator[tuple[nn.Module, type[nn.Module]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The operators, device, meshes and quantization that a model's layers are replaced for."""

    operators: Operators
    device_type: str
    meshes: ModelMeshes | None
    quantized: QuantizedBase | None


def _recurrent(model: Any, target: _Target) -> Replaced:
    context = target.meshes.cp if target.meshes is not None and target.meshes.cp.size() > 1 else None
    return packed_layers(model, context)


def _split(model: Any, target: _Target) -> Replaced:
    return iter(()) if target.meshes is None else split_layers(model, target.meshes)


def _computed(model: Any, target: _Target) -> Replaced:
    return target.operators.layers(model, target.device_type)


def _quantized(model: Any, target: _Target) -> Replaced:
    return iter(()) if target.quantized is None else quantized_layers(model, target.quantized, target.operators.linear)


# The classes that a layer may get, and by whom. Linear layers that are split are no longer plain ones, so the operators
# leave them alone; those in few bits take the place of the operators', whose product they compute.
REPLACEMENTS: tuple[Callable[[Any, _Target], Replaced], ...] = (
    lambda model, _: joining_experts(model),  # experts.py: experts that may be left without any token
    lambda model, _: layers_by_length(model),  # rotary.py: rotary embeddings of each sequence's own length
    _recurrent,  # recurrent.py: layers whose state starts with every sequence
    _split,  # split.py, tensor_parallel.py, experts.py: parts of layers, by parallel.tp and parallel.ep
    _computed,  # operators.py: fused.py, those of a CPU, or exact/ with an engine's bits
    _quantized,  # lora/quantized.py: frozen weights of linear layers in few bits
)


def replace_layers(
    model: nn.Module,
    operators: Operators,
    *,
    device_type: str = "cpu",
    meshes: ModelMeshes | None = None,
    quantized: QuantizedBase | None = None,
) -> None:
    """Replace a model's layers, before it is sharded; its weights are tied and may be on the meta device.

    Without `meshes` every layer stays whole. Raises UserError for a model that cannot be split over them.
    """
    target = _Target(operators=operators, device_type=device_type, meshes=meshes, quantized=quantized)
    for replaced in REPLACEMENTS:
        set_classes(replaced(model, target))


def set_classes(pairs: Iterable[tuple[nn.Module, type[nn.Module]]]) -> None:
    """Give each module its new class, after all pairs have been made."""
    for module, kind in list(pairs):
        module.__class__ = kind
