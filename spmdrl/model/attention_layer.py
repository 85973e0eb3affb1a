"""The signature that every attention function here shares: (query, key, value, layer) -> result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """The properties of one attention layer, apart from its queries, keys and values."""

    index: int  # place in the model
    scale: float  # multiplies each product of a query and a key
    window: int | None = None  # a token sees itself and window - 1 tokens before it; None: all before it
    sinks: Tensor | None = None  # [H], one more logit in each softmax of a head, without a value; see sinks.py


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKeys:
    """The keys of a cache that the newest token of each row sees: its own, and those before it."""

    lengths: Tensor  # [n] int64, tokens of each row, the newest included
    shortest: int
    longest: int
    window: int | None = None  # as of an `AttentionLayer`

    def through(self, window: int | None) -> SeenKeys:
        """Return what a layer with this window sees."""
        return self if window is None else replace(self, window=window)

    @property
    def hidden(self) -> Tensor | None:
        """Return the keys that rows do not see, [n, longest] bool; None where all rows see all of them."""
        if self.shortest == self.longest and self.window is None:
            return None
        distance = self.lengths[:, None] - 1 - torch.arange(self.longest, device=self.lengths.device)
        return (distance < 0) if self.window is None else (distance < 0) | (distance >= self.window)


# Attention over the tokens that the model's caller passes, in transformers' layout: query [1, H, T, D], key and value
# [1, K, T, D] with K dividing H; the result is [1, T, H, D].
Attend = Callable[[Tensor, Tensor, Tensor, AttentionLayer], Tensor]

# Causal attention of one rank over packed sequences: q [T, H, D], k and v [earlier + T, K, D] with K dividing H; the
# result is [T, H, D]. `SequenceLayout` says which tokens form a sequence.
CausalAttention = Callable[[Tensor, Tensor, Tensor, AttentionLayer], Tensor]
