"""The signature that every attention function here shares: (query, key, value, layer) -> result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """The properties of one attention layer, apart from its queries, keys and values."""

    index: int  # place in the model
    scale: float  # multiplies each product of a query and a key
    window: int | None = None  # a token sees itself and window - 1 tokens before it; None: all before it
    sinks: Tensor | None = None  # [H], one more logit in each softmax of a head, without a value; see below
    softcap: float | None = None  # scores s become c tanh(s / c)

    @property
    def is_plain(self) -> bool:
        """True where scores and softmax are those that every kernel knows."""
        return self.sinks is None and self.softcap is None


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


# Attention sinks for kernels that do not implement them.
#
# A head's sink is one more logit in each of its softmaxes. It takes probability away from the keys and has no value
# of its own. A kernel that returns only its output is given the sink as one more key. For a kernel that also returns
# its normalizer, the output is rescaled afterwards. So are the outputs of several calls, each over a part of the keys.


def prepend_sink(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add the sink as a first token and one more component: q [n, H, 1 + L, D + 1], k and v likewise.

    In the new component q holds its head's entry of scores [H], and k holds 1 in the new token and 0 elsewhere, so that
    the product of any query with that token is the score. The token's value is 0. Any kernel and its backward pass
    then compute sinks without knowing it.
    """
    column = scores.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, column], dim=-1), (0, 0, 1, 0))
    sink = F.pad(k.new_ones(*k.shape[:2], 1, 1), (k.shape[-1], 0))
    return q, torch.cat([sink, F.pad(k, (0, 1))], dim=2), F.pad(v, (0, 1, 1, 0))


class NormalizerKernel(Protocol):
    """Attention that also returns the logarithm of each softmax's denominator, and its backward pass.

    q, out and grad are [T, H, D], k and v [keys, H or K, D]; lse is [H, T] float32, of a kernel for float64 float64.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse)."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""


@dataclass(frozen=True, slots=True)
class Part:
    """One more call of a kernel: some of the queries, and keys that they see besides."""

    kernel: NormalizerKernel
    queries: Tensor  # [Q] int64, rows of all queries, each once
    keys: Tensor  # [L] int64, rows of all keys, each once


def attention_in_parts(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kernel: NormalizerKernel, parts: Sequence[Part] = ()
) -> Tensor:
    """Attention [T, H, D] by `kernel`, over the keys of further parts as well, with sinks [H] in its softmaxes;
    differentiable in all four tensors."""
    out: Tensor = _AttentionInParts.apply(q, k, v, sinks, kernel, parts)
    return out


class _AttentionInParts(torch.autograd.Function):
    """Weigh the output of each call by its share of the whole denominator, of which a sink is a part without a value.

    The kernels' own backward passes work unchanged. They compute p = exp(score - lse) and
    d score = p * (grad . v - grad . out), which stay true for some of the keys with the lse and out of all. The value
    of a sink is 0, hence d sink = -p_sink * (grad . out).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        kernel: NormalizerKernel,
        parts: Sequence[Part],
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v)
        dtype, out = out.dtype, out.to(lse.dtype) if parts else out
        for part in parts:
            rows = part.queries
            more, lse_of_part = part.kernel.forward(q[rows], k[part.keys], v[part.keys])
            before = lse[:, rows]
            lse[:, rows] = whole = torch.logaddexp(before, lse_of_part)
            out[rows] = out[rows] * _of_heads((before - whole).exp()) + more * _of_heads((lse_of_part - whole).exp())
        if sinks is not None:
            without, lse = lse, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
            out = out * _of_heads((without - lse).exp())
        out = out.to(dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.kernel, ctx.parts = kernel, parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad, by_sinks = grad.contiguous(), None
        grads = ctx.kernel.backward(grad, q, k, v, out, lse)
        if ctx.parts:
            grads = tuple(x.to(lse.dtype) for x in grads)
        for part in ctx.parts:
            rows, keys = part.queries, part.keys
            of_queries, of_keys = (grad[rows], q[rows]), (k[keys], v[keys])
            of_part = part.kernel.backward(*of_queries, *of_keys, out[rows], lse[:, rows].contiguous())
            for whole, more, its_rows in zip(grads, of_part, (rows, keys, keys), strict=True):
                whole[its_rows] += more
        if sinks is not None:
            p_sink = (sinks.to(lse.dtype)[:, None] - lse).exp()  # [H, T]
            by_sinks = -(p_sink * (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).t()).sum(1).to(sinks.dtype)
        return *(x.to(q.dtype) for x in grads), by_sinks, None, None


def _of_heads(weights: Tensor) -> Tensor:
    """[H, T] to [T, H, 1]."""
    return weights.t()[..., None]
