"""Groups of parameters by patterns of their names: those with a learning rate of their own, and those not trained."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from spmdrl.families import vision_family

# Parameters by patterns of their names in the base model, such as "visual.*" or "layers.0.mlp.*".


def named_by_base(model: PreTrainedModel) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Yield (name in `model`, name for patterns, parameter); seen from the base model, the head keeps its own name.

    The model may be on the meta device, or sharded.
    """
    prefix = f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():
        yield name, name.removeprefix(prefix), parameter


def matches(name: str, patterns: Iterable[str]) -> list[str]:
    """Return those of the patterns that match a name as seen from the base model."""
    return [pattern for pattern in patterns if fnmatchcase(name, pattern)]


def unknown_pattern(setting: str, pattern: str, model: PreTrainedModel) -> str:
    """Return the sentence about a pattern that names no parameter of the model."""
    names = [name for _, name, _ in named_by_base(model)]
    roots = ", ".join(f'"{root}.*"' for root in dict.fromkeys(name.partition(".")[0] for name in names))
    return (
        f'{setting} names "{pattern}", and {type(model).__name__} has no such parameter; its parameters are '
        f'{roots}, such as "{names[0]}"'
    )


# Parameters that have a learning rate of their own, by the patterns of `optim.rates`.


def patterns_of(model: PreTrainedModel, patterns: Iterable[str]) -> dict[nn.Parameter, str]:
    """Return the pattern that names each parameter, of those that one names; `model` may be sharded."""
    patterns = list(patterns)
    found = {parameter: matches(name, patterns) for _, name, parameter in named_by_base(model)}
    return {parameter: named[0] for parameter, named in found.items() if named}


def rate_problems(model: PreTrainedModel, patterns: Iterable[str], freeze: Sequence[str] | None) -> Iterator[str]:
    """Yield a sentence for each pattern that names no parameter or only frozen ones, and for two that name the same."""
    patterns = list(patterns)
    found = {name: matches(base_name, patterns) for name, base_name, _ in named_by_base(model)}
    frozen = frozen_parameters(model, freeze)
    for pattern in patterns:
        named = [name for name, by in found.items() if pattern in by]
        if not named:
            yield unknown_pattern("optim.rates", pattern, model)
        elif frozen.keys() >= {*named}:
            why = (
                "the tower is not trained as long as model.freeze is not set; set model.freeze = [] to train it"
                if freeze is None
                else f"model.freeze = {[*freeze]} leaves none of them to train; name fewer parameters there"
            )
            yield f'optim.rates has a rate for "{pattern}", but {why}, or remove the rate'
    for first, second in dict.fromkeys((by[0], by[1]) for by in found.values() if len(by) > 1):
        (name, *_) = (name for name, by in found.items() if by[:2] == [first, second])
        yield f'optim.rates has two rates for {name}, of "{first}" and of "{second}"; name each parameter once'


# The part of a model that is not trained: its tower for images, or what `model.freeze` names.


def frozen_patterns(model: PreTrainedModel, freeze: Sequence[str] | None) -> tuple[str, ...]:
    """Return the patterns of what is frozen; where none are set, those of the tower if the model has one."""
    if freeze is not None:
        return tuple(freeze)
    family = vision_family(model.config)
    return () if family is None else tuple(f"{name}.*" for name in family.tower)


def frozen_parameters(model: PreTrainedModel, freeze: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the frozen parameters by their names in `model`, which may be on the meta device, or sharded."""
    patterns = frozen_patterns(model, freeze)
    return {name: parameter for name, base_name, parameter in named_by_base(model) if matches(base_name, patterns)}


def freeze_problems(model: PreTrainedModel, freeze: Sequence[str] | None) -> Iterator[str]:
    """Yield a sentence for each pattern that names no parameter, and when all parameters are frozen."""
    names = [name for _, name, _ in named_by_base(model)]
    for pattern in freeze or ():
        if not any(matches(name, [pattern]) for name in names):
            yield unknown_pattern("model.freeze", pattern, model)
    if freeze and len(frozen_parameters(model, freeze)) == len(names):
        yield f"model.freeze = {[*freeze]} leaves nothing to train; name fewer parameters"
