"""Which weights of a model get adapters: by the ends of their modules' names, or all that can have one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from spmdrl.model.adapters import Target
from spmdrl.model.linear import linear
from spmdrl.model.low_rank import LinearTarget, Product

ALL_LINEAR = "all-linear"
Wanted = str | Sequence[str]  # "all-linear", or ends of names


def targets_of(
    model: PreTrainedModel, wanted: Wanted, *, multiply: Product = linear, tp: DeviceMesh | None = None
) -> list[Target]:
    """Find the weights that get adapters, in the order of the model; it may be on the meta device, or sharded."""
    chosen = [(name, layer) for name, layer in _linears(model) if wanted == ALL_LINEAR or _is_in(name, wanted)]
    return [LinearTarget(name, layer, multiply, tp) for name, layer in chosen]


def target_problems(model: PreTrainedModel, wanted: Wanted) -> Iterator[str]:
    """Yield a sentence for each of `lora.targets` that names nothing, or something that gets no adapter."""
    if wanted == ALL_LINEAR:
        return
    linears = [name for name, _ in _linears(model)]
    modules = dict(model.named_modules())
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    for target in wanted:
        if any(_is_in(name, [target]) for name in linears):
            continue
        found = {name: module for name, module in modules.items() if _is_in(name, [target])}
        known = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linears))
        if not found:
            yield f'lora.targets names "{target}", but {type(model).__name__} has no such layer; its layers are {known}'
        elif any(module in ends for module in found.values()):
            tied = ", which share their weights" if model.config.get_text_config().tie_word_embeddings else ""
            yield (
                f'lora.targets names "{target}", but embedding and head{tied} get no adapters; leave it out: the '
                f"others are {known}"
            )
        else:
            kind = type(next(iter(found.values()))).__name__
            yield f'lora.targets names "{target}", which is no linear layer but a {kind}; the linear layers are {known}'


def short_names(model: PreTrainedModel, targets: Sequence[Target]) -> list[str]:
    """Name the modules of these targets by their last parts, as PEFT's files do; in full where that would name others
    too."""
    chosen = {target.module for target in targets}
    short = sorted({name.rpartition(".")[2] for name in chosen})
    return short if {name for name, _ in model.named_modules() if _is_in(name, short)} == chosen else sorted(chosen)


def _linears(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            yield name, module


def _is_in(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
