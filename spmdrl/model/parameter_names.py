"""Parameters by patterns of their names in the base model, such as "visual.*" or "layers.0.mlp.*"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel


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
