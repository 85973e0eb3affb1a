"""Attention whose scores are capped softly, for devices and packages without a kernel that does it.

A score s becomes c tanh(s / c) before the softmax, as in Gemma 2. Queries are computed a block after the other, and
backward computes scores again: what is stored is the result and the logarithm of each softmax's denominator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK_BYTES = 2**24  # of the scores of a block of queries, in float32; some four times as much exists at a time


class _Part(NamedTuple):
    """A block of queries, and the keys that at least one of them sees."""

    queries: slice
    keys: slice
    hidden: Tensor  # [queries, keys] bool


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float, window: int | None = None
) -> Tensor:
    """Causal attention: q [n, H, Q, D], k and v [n, K, L, D] with K dividing H give [n, H, Q, D].

    The last query and the last key are the same token; a token sees itself and `window` - 1 tokens before it.
    """
    return _capped(q, k, v, scale, softcap, window)[0]


def cap_scores(scores: Tensor, softcap: float) -> Tensor:
    """Cap scores of attention, in place."""
    return scores.div_(softcap).tanh_().mul_(softcap)


def _parts(q: Tensor, k: Tensor, window: int | None) -> Iterator[_Part]:
    num_queries, num_keys = q.shape[2], k.shape[2]
    size = max(1, _BLOCK_BYTES // (4 * q.shape[0] * q.shape[1] * num_keys))
    before = num_keys - num_queries
    for start in range(0, num_queries, size):
        end = min(num_queries, start + size)
        first = 0 if window is None else max(0, before + start - window + 1)
        distance = torch.arange(before + start, before + end, device=q.device)[:, None] - torch.arange(
            first, before + end, device=q.device
        )
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        yield _Part(slice(start, end), slice(first, before + end), hidden)


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """[n, H, Q, D] to [n, K, H / K, Q, D]."""
    return x.unflatten(1, (num_kv_heads, -1))


def _scores(part: _Part, q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """Return capped scores [n, K, H / K, queries, keys] float32, without what is hidden."""
    return cap_scores(torch.matmul(q, k.transpose(-1, -2)).float().mul_(scale), softcap)


# An operator of its own, so that selective checkpointing stores its results and nothing inside.
@torch.library.custom_op("spmdrl::capped_attention", mutates_args=())
def _capped(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, window: int | None) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    for part in _parts(q, k, window):
        query = _grouped(q[:, :, part.queries], k.shape[1])
        key, value = (x[:, :, None, part.keys] for x in (k, v))
        scores = _scores(part, query, key, scale, softcap).masked_fill_(part.hidden, -torch.inf)
        lse[:, :, part.queries] = scores.logsumexp(-1).flatten(1, 2)
        out[:, :, part.queries] = torch.matmul(scores.softmax(-1).to(v.dtype), value).flatten(1, 2)
    return out, lse


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.softcap, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    by_q, by_k, by_v = torch.empty_like(q), *(torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
    for part in _parts(q, k, ctx.window):
        query, by_out, result, normalizer = (
            _grouped(x[:, :, part.queries], k.shape[1]) for x in (q, grad, out, lse.unsqueeze(-1))
        )
        key, value = (x[:, :, None, part.keys] for x in (k, v))
        scores = _scores(part, query, key, ctx.scale, ctx.softcap)
        weights = (scores - normalizer).exp_().masked_fill_(part.hidden, 0)
        slope = scores.div_(ctx.softcap).square_().neg_().add_(1)  # of the cap
        by_weights = torch.matmul(by_out, value.transpose(-1, -2)).float()
        by_weights.sub_((by_out.float() * result.float()).sum(-1, keepdim=True))
        by_scores = by_weights.mul_(weights).mul_(slope).mul_(ctx.scale).to(q.dtype)
        weights = weights.to(v.dtype)
        by_q[:, :, part.queries] = torch.matmul(by_scores, key).flatten(1, 2)
        by_k[:, :, part.keys] += torch.matmul(by_scores.transpose(-1, -2), query).sum(2)
        by_v[:, :, part.keys] += torch.matmul(weights.transpose(-1, -2), by_out).sum(2)
    return by_q, by_k.to(k.dtype), by_v.to(v.dtype), None, None, None


_capped.register_autograd(_backward, setup_context=_save)
