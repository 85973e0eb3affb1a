"""Attention that returns its normalizers, and may cap scores: by torch's kernel for a CPU, or by matrix products.

With a soft cap a score s becomes c tanh(s / c) before the softmax, as in Gemma 2. Queries are computed a block after
the other, and backward computes scores again: what is stored is the result and the logarithm of each softmax's
denominator. That may be a larger one, if the result is that of more keys than these: backward then computes their part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BLOCK_BYTES = 2**24  # of the scores of a block of queries, in float32; some four times as much exists at a time


class ScoreRule(NamedTuple):
    """The scores of queries [n, H, Q, D] and keys [n, K, L, D], with K dividing H, and which of them are seen."""

    scale: float  # multiplies each product of a query and a key
    softcap: float | None = None
    window: int | None = None  # a token sees itself and `window` - 1 tokens before it
    is_causal: bool = True  # then the last query and the last key are the same token; else all keys are seen


class _Part(NamedTuple):
    """A block of queries, and the keys that at least one of them sees."""

    queries: slice
    keys: slice
    hidden: Tensor | None  # [queries, keys] bool


def attend(q: Tensor, k: Tensor, v: Tensor, of: ScoreRule) -> tuple[Tensor, Tensor]:
    """Return (out [n, H, Q, D], the logarithms of the denominators [n, H, Q]); only the first is differentiable."""
    out, lse = _attend(q, k, v, *of)
    return out, lse


def _is_fused(q: Tensor, k: Tensor, of: ScoreRule) -> bool:
    """True where torch has a kernel for a CPU that returns normalizers."""
    is_plain = of.softcap is None and of.window is None
    return q.device.type == "cpu" and is_plain and (q.shape[2] == k.shape[2] or not of.is_causal)


def cap_scores(scores: Tensor, softcap: float) -> Tensor:
    """Cap scores of attention, in place."""
    return scores.div_(softcap).tanh_().mul_(softcap)


def wide(x: Tensor) -> Tensor:
    """Return values in float32, or in float64 if they are."""
    return x if x.dtype == torch.float64 else x.float()


def _parts(q: Tensor, k: Tensor, of: ScoreRule) -> Iterator[_Part]:
    num_queries, num_keys = q.shape[2], k.shape[2]
    size = max(1, _BLOCK_BYTES // (4 * q.shape[0] * q.shape[1] * num_keys))
    before = num_keys - num_queries
    for start in range(0, num_queries, size):
        end = min(num_queries, start + size)
        if not of.is_causal:
            yield _Part(slice(start, end), slice(0, num_keys), None)
            continue
        first = 0 if of.window is None else max(0, before + start - of.window + 1)
        distance = torch.arange(before + start, before + end, device=q.device)[:, None] - torch.arange(
            first, before + end, device=q.device
        )
        hidden = distance < 0 if of.window is None else (distance < 0) | (distance >= of.window)
        yield _Part(slice(start, end), slice(first, before + end), hidden)


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """[n, H, Q, D] to [n, K, H / K, Q, D]."""
    return x.unflatten(1, (num_kv_heads, -1))


def _scores(q: Tensor, k: Tensor, of: ScoreRule) -> Tensor:
    """Return scores [n, K, H / K, queries, keys] in float32 or float64, also of what is hidden."""
    scores = wide(torch.matmul(q, k.transpose(-1, -2))).mul_(of.scale)
    return scores if of.softcap is None else cap_scores(scores, of.softcap)


# An operator of its own, so that selective checkpointing stores its results and nothing inside.
@torch.library.custom_op("spmdrl::plain_attention", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, window: int | None, is_causal: bool
) -> tuple[Tensor, Tensor]:
    of = ScoreRule(scale, softcap, window, is_causal)
    if _is_fused(q, k, of):
        found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return found
    out, lse = torch.empty_like(q), wide(q.new_empty(q.shape[:3]))
    for part in _parts(q, k, of):
        query = _grouped(q[:, :, part.queries], k.shape[1])
        key, value = (x[:, :, None, part.keys] for x in (k, v))
        scores = _scores(query, key, of)
        if part.hidden is not None:
            scores.masked_fill_(part.hidden, -torch.inf)
        lse[:, :, part.queries] = scores.logsumexp(-1).flatten(1, 2)
        out[:, :, part.queries] = torch.matmul(scores.softmax(-1).to(v.dtype), value).flatten(1, 2)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, of: ScoreRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, for that of `out`; out and lse may be those of more keys than k."""
    if _is_fused(q, k, of):
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, of.is_causal, scale=of.scale
        )
        return grads
    by_q, by_k, by_v = torch.empty_like(q), *(wide(torch.zeros_like(x)) for x in (k, v))
    for part in _parts(q, k, of):
        query, by_out, result, normalizer = (
            _grouped(x[:, :, part.queries], k.shape[1]) for x in (q, grad, out, lse.unsqueeze(-1))
        )
        key, value = (x[:, :, None, part.keys] for x in (k, v))
        scores = _scores(query, key, of)
        weights = (scores - normalizer).exp_()
        if part.hidden is not None:
            weights.masked_fill_(part.hidden, 0)
        by_weights = wide(torch.matmul(by_out, value.transpose(-1, -2)))
        by_weights = by_weights.sub_((wide(by_out) * wide(result)).sum(-1, keepdim=True)).mul_(weights)
        if of.softcap is not None:
            by_weights.mul_(scores.div_(of.softcap).square_().neg_().add_(1))  # the slope of the cap
        by_scores = by_weights.mul_(of.scale).to(q.dtype)
        by_q[:, :, part.queries] = torch.matmul(by_scores, key).flatten(1, 2)
        by_k[:, :, part.keys] += torch.matmul(by_scores.transpose(-1, -2), query).sum(2)
        by_v[:, :, part.keys] += torch.matmul(weights.to(v.dtype).transpose(-1, -2), by_out).sum(2)
    return by_q, by_k.to(k.dtype), by_v.to(v.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *of = inputs
    ctx.of = ScoreRule(*of)
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    return *attend_backward(grad, q, k, v, out, lse, ctx.of), None, None, None, None


_attend.register_autograd(_backward, setup_context=_save)
