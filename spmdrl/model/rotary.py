"""Rotary embeddings whose frequencies depend on how long a sequence is: `longrope` and `dynamic`.

transformers chooses the frequencies by the largest position of a batch, so one long sequence of a pack would change all
others. Here every sequence has those of its own length, as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.families import family_of

_LONGROPE = "longrope"  # one set of frequencies up to a length, another one beyond it
_BY_LENGTH = {_LONGROPE, "dynamic"}  # dynamic: other frequencies for every length beyond one


def changes_after(model_config: Any) -> int | None:
    """Return the length beyond which a sequence has other rotary frequencies; None where all lengths have the same."""
    return min((limit for _, limit in _limits(model_config)), default=None)


def changes_between(model_config: Any, shorter: int, longer: int) -> bool:
    """Return True when a sequence's rotary frequencies change while it grows from `shorter` to `longer` tokens."""
    return any(
        longer > limit and (shorter <= limit or (rope_type != _LONGROPE and shorter < longer))
        for rope_type, limit in _limits(model_config)
    )


ALLOWED_BY = "data.max_prompt_tokens and max_response_tokens"


def length_problems(
    model_config: Any, longest: int, *, are_sampled: bool, allowed_by: str = ALLOWED_BY
) -> Iterator[str]:
    """Yield a sentence when sequences of up to `longest` tokens would not have the frequencies that they should have.

    `are_sampled`: whether an engine samples them, which cannot know how long a sequence will be. `allowed_by`: the
    settings that say how long.
    """
    text, limit = model_config.get_text_config(), changes_after(model_config)
    if limit is None or not limit < longest <= text.max_position_embeddings:  # beyond which no model's run may be
        return
    lengths = f"{allowed_by} allow sequences of {longest} tokens"
    lower = f"lower them to {limit} together"
    if family_of(text).reads_short_factors_only:
        left_out = f"the long factors of {text.model_type}'s longrope"
        yield f"{lengths}, and beyond {limit} transformers leaves out {left_out}; {lower}"
    elif are_sampled:
        yield (
            f"{lengths}, and beyond {limit} this model ({text.model_type}) has other rotary frequencies from the first "
            f"token on, so that what was sampled before would be trained with others; {lower}, or give the model one "
            'set of frequencies (docs/models.md, "Rotary embeddings by length")'
        )


def lengths_of_tokens(seqlens: Sequence[int]) -> Tensor:
    """Return the length of each token's sequence, [T] int64, of sequences that are laid end to end."""
    lengths = torch.tensor(seqlens, dtype=torch.int64)
    return lengths.repeat_interleave(lengths)


def layers_by_length(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the rotary embeddings that depend on lengths, each with a class that takes those of its tokens."""
    for module in model.modules():
        kind = type(module)
        if _types_of(module) & _BY_LENGTH and not isinstance(module, _ByOwnLength):
            yield module, type(kind.__name__, (_ByOwnLength, kind), {"__module__": kind.__module__})


class RotaryByLength:
    """The rotary embeddings of a decoder that depend on lengths; most decoders have none."""

    def __init__(self, decoder: nn.Module) -> None:
        self._modules: list[Any] = [module for module in decoder.modules() if _types_of(module) & _BY_LENGTH]

    @contextmanager
    def at(self, lengths: Tensor) -> Iterator[None]:
        """Surround a forward pass of T tokens; `lengths` [T] int64, on the host, are those of their whole sequences."""
        for module in self._modules:
            assert isinstance(module, _ByOwnLength), "the model's layers were not replaced"
            module.lengths = lengths
        try:
            yield
        finally:
            for module in self._modules:
                module.lengths = None


class _ByOwnLength(nn.Module):
    """Computes each length's cosines and sines by transformers' own module, as for a batch of that length alone."""

    lengths: Tensor | None = None
    config: Any

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """position_ids [..., T] give two tables [..., T, D]."""
        if self.lengths is None:
            return super().forward(x, position_ids, *args, **kwargs)
        limit = changes_after(self.config)
        assert limit is not None
        alike = self.lengths.clamp(min=limit)  # to those that have the same frequencies
        if _types_of(self) == {_LONGROPE}:
            alike = alike.clamp(max=limit + 1)
        places, tables = [], []
        for length in alike.unique().tolist():
            places.append(torch.nonzero(alike == length).flatten().to(position_ids.device))
            own = position_ids.index_select(-1, places[-1])
            # One position more, the last of such a sequence: transformers searches for the largest.
            own = torch.cat([own, own.new_full((*own.shape[:-1], 1), length - 1)], dim=-1)
            tables.append([table[..., :-1, :] for table in self._alone(x, own, *args, **kwargs)])
        if len(places) == 1:
            return tuple(tables[0])
        order = torch.cat(places).argsort()
        return tuple(torch.cat(parts, dim=-2).index_select(-2, order) for parts in zip(*tables, strict=True))

    def _alone(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Call transformers' forward on a copy: it leaves the frequencies of one call to the next."""
        plain = copy.copy(self)
        plain._buffers = dict(self._buffers)
        plain.lengths = None
        tables: tuple[Tensor, ...] = plain.forward(*args, **kwargs)
        return tables


def _types_of(module: nn.Module) -> set[Any]:
    """The types of a module's rotary embeddings, of which some have one for each type of layer; none of others."""
    types = getattr(module, "rope_type", None)
    return set(types.values()) if isinstance(types, dict) else {types}


def _limits(model_config: Any) -> list[tuple[str, int]]:
    """The types of rotary embeddings that depend on lengths, and the longest sequences with their first frequencies.

    Some models have settings for each type of layer.
    """
    text = model_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    found = []
    for settings in [of_type for of_type in rope.values() if isinstance(of_type, dict)] or [rope]:
        if settings.get("rope_type") == _LONGROPE:
            found.append((_LONGROPE, settings["original_max_position_embeddings"]))
        elif settings.get("rope_type") in _BY_LENGTH:
            found.append((settings["rope_type"], text.max_position_embeddings))
    return found
