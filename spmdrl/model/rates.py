"""Parameters that have a learning rate of their own, by the patterns of `optim.rates`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from spmdrl.model.frozen import frozen_parameters
from spmdrl.model.parameter_names import matches, named_by_base, unknown_pattern


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
