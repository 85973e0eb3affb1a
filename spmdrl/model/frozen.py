"""The part of a model that is not trained: its tower for images, or what `model.freeze` names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from spmdrl.data.families import family_of
from spmdrl.model.parameter_names import matches, named_by_base, unknown_pattern


def frozen_patterns(model: PreTrainedModel, freeze: Sequence[str] | None) -> tuple[str, ...]:
    """Return the patterns of what is frozen; where none are set, those of the tower if the model has one."""
    if freeze is not None:
        return tuple(freeze)
    family = family_of(model.config)
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
