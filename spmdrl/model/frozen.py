"""The part of a model that is not trained: its tower for images, or what `model.freeze` names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from spmdrl.data.families import family_of


def frozen_patterns(model: PreTrainedModel, freeze: Sequence[str] | None) -> tuple[str, ...]:
    """Return the patterns of what is frozen; where none are set, those of the tower if the model has one."""
    if freeze is not None:
        return tuple(freeze)
    family = family_of(model.config)
    return () if family is None else tuple(f"{name}.*" for name in family.tower)


def frozen_parameters(model: PreTrainedModel, freeze: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the frozen parameters by their names in `model`, which may be on the meta device, or sharded."""
    patterns = frozen_patterns(model, freeze)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if any(fnmatchcase(_name(model, name), pattern) for pattern in patterns)
    }


def freeze_problems(model: PreTrainedModel, freeze: Sequence[str] | None) -> Iterator[str]:
    """Yield a sentence for each pattern that names no parameter, and when all parameters are frozen."""
    names = [_name(model, name) for name, _ in model.named_parameters()]
    for pattern in freeze or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            roots = ", ".join(f'"{root}.*"' for root in dict.fromkeys(name.partition(".")[0] for name in names))
            yield (
                f'model.freeze names "{pattern}", and {type(model).__name__} has no such parameter; its parameters are '
                f'{roots}, such as "{names[0]}"'
            )
    if freeze and len(frozen_parameters(model, freeze)) == len(names):
        yield f"model.freeze = {[*freeze]} leaves nothing to train; name fewer parameters"


def _name(model: PreTrainedModel, name: str) -> str:
    """Name a parameter as seen from the base model; the head keeps its own name."""
    return name.removeprefix(f"{model.base_model_prefix}.")
