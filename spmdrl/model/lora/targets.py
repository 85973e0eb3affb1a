"""Which weights of a model get adapters: by the ends of their modules' names, or all that can have one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from spmdrl.families import family_of
from spmdrl.model.linear import linear
from spmdrl.model.lora.adapters import Target
from spmdrl.model.lora.layers import ExpertsTarget, LinearTarget, WeightProduct
from spmdrl.model.trunk import Trunk

ALL_LINEAR = "all-linear"
Wanted = str | Sequence[str]  # "all-linear", or ends of names


def targets_of(
    model: PreTrainedModel, wanted: Wanted, *, multiply: WeightProduct = linear, tp: DeviceMesh | None = None
) -> list[Target]:
    """Find the weights that get adapters, in the order of the model; it may be on the meta device, or sharded."""
    found: list[Target] = [
        LinearTarget(name, layer, multiply, tp) for name, layer in _linears(model) if _is_wanted(name, wanted)
    ]
    for name, module in model.named_modules():
        weights = _weights(module) if hasattr(module, "num_experts") else []
        chosen = [weight for weight in weights if _is_wanted(f"{name}.{weight}", wanted)]
        for place, weight in enumerate(reversed(chosen)):
            # PEFT wraps a module once for each of its parameters, the last one outermost.
            found.append(ExpertsTarget(name + place * ".base_layer", f"{name}.{weight}", module, tp))
    return found


def target_problems(model: PreTrainedModel, wanted: Wanted) -> Iterator[str]:
    """Yield a sentence for each of `lora.targets` that names nothing, or something that gets no adapter."""
    if wanted == ALL_LINEAR:
        return
    adapted = [target.weight.removesuffix(".weight") for target in targets_of(model, ALL_LINEAR)]
    modules = dict(model.named_modules())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for target in wanted:
        if any(_is_in(name, [target]) for name in adapted):
            continue
        found = {name: module for name, module in modules.items() if _is_in(name, [target])}
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in adapted))
        if not found:
            yield f'lora.targets names "{target}", but {type(model).__name__} has no such layer; its layers are {known}'
        elif any(module in ends for module in found.values()):
            tied = ", which share their weights," if model.config.get_text_config().tie_word_embeddings else ""
            yield (
                f'lora.targets names "{target}", but embedding and head{tied} get no adapters; leave it out: the '
                f"others are {known}"
            )
        else:
            kind = type(next(iter(found.values()))).__name__
            yield f'lora.targets names "{target}", which is no linear layer but a {kind}; the linear layers are {known}'


def short_names(model: PreTrainedModel, targets: Sequence[Target]) -> tuple[list[str], list[str]]:
    """Name the linear layers, and the parameters of experts, of these targets: by the last part or parts of their
    names, as PEFT's files do, or in full where that would name others too."""
    layers = {target.module for target in targets if isinstance(target, LinearTarget)}
    weights = {target.weight for target in targets if isinstance(target, ExpertsTarget)}
    modules, parameters = model.named_modules(), model.named_parameters()
    return _ends(layers, [name for name, _ in modules], 1), _ends(weights, [name for name, _ in parameters], 2)


def _ends(names: set[str], everyones: Sequence[str], num_parts: int) -> list[str]:
    """Return the last parts of these names, or the names themselves if others of `everyones` end so too."""
    ends = sorted({".".join(name.split(".")[-num_parts:]) for name in names})
    return ends if {name for name in everyones if _is_in(name, ends)} == names else sorted(names)


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    decoder = set(Trunk(model).decoder.modules())  # a tower stays as it is
    bare = family_of(model.config).bare_linears
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module in decoder and not (bare and name.endswith(bare)):
            yield name, module


def _weights(experts: nn.Module) -> list[str]:
    """Name the parameters that hold a matrix for each expert."""
    return [name for name, weight in experts._parameters.items() if weight is not None and weight.ndim == 3]


def _is_wanted(name: str, wanted: Wanted) -> bool:
    return wanted == ALL_LINEAR or _is_in(name, wanted)


def _is_in(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
