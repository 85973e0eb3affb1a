"""Causal attention of short sequences on a CPU: plain products, many sequences in one call.

torch's fused kernel works on one sequence and one head at a time; below some hundred tokens its overhead is most of
what it does. Here a batch of sequences is three products, whose probabilities are kept for backward: T H L numbers for
T tokens in sequences of L.

Sequences of similar lengths form a batch, padded at their ends. No query sees the padding of its own sequence, because
it comes later, so the results are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_TOKENS = 128  # of a sequence; at this length the fused kernel takes as long, and memory grows with the length
_MAX_PADDED = 1.25  # times the tokens of a batch: more calls cost more than this much more work


def batches_of_similar_length(seqlens: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Group neighbouring sequences, in their order; those longer than `limit` only with others of equal length."""
    batch: list[int] = []
    longest = total = 0
    for length in seqlens:
        longest_then = max(longest, length)
        is_padded_too_much = longest_then * (len(batch) + 1) > _MAX_PADDED * (total + length)
        is_mixed = longest_then > limit and length != longest
        if batch and (is_padded_too_much or is_mixed):
            yield batch
            batch, longest, total = [], 0, 0
        batch.append(length)
        longest, total = max(longest, length), total + length
    if batch:
        yield batch


def attend_short(q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """Causal attention within sequences: q [T, H, D], k and v [T, K, D] with K dividing H give [T, H, D]."""
    result: Tensor = _ShortAttention.apply(q, k, v, seqlens, scale)
    return result


class _Batch:
    """A batch of sequences as matrices: one for each sequence and key head; its query heads are neighbouring rows."""

    def __init__(self, seqlens: list[int], num_kv_heads: int, device: torch.device) -> None:
        self.length = max(seqlens)
        self._num_kv_heads = num_kv_heads
        self._places: Tensor | None = None  # of the tokens in the padded batch; None where nothing is padded
        self._num_padded = len(seqlens) * self.length
        if self._num_padded != sum(seqlens):
            lengths = torch.tensor(seqlens, device=device)
            self._places = (torch.arange(self.length, device=device) < lengths[:, None]).flatten().nonzero().flatten()

    def matrices(self, x: Tensor) -> Tensor:
        """[T, K G, D] to [n K, L G, D], 0 where padded."""
        if self._places is not None:
            x = x.new_zeros(self._num_padded, *x.shape[1:]).index_copy_(0, self._places, x)
        heads = x.unflatten(1, (self._num_kv_heads, -1)).unflatten(0, (-1, self.length))  # [n, L, K, G, D]
        return heads.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def tokens(self, x: Tensor) -> Tensor:
        """[n K, L G, D] back to [T, K G, D]."""
        heads = x.unflatten(1, (self.length, -1)).unflatten(0, (-1, self._num_kv_heads))  # [n, K, L, G, D]
        padded = heads.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return padded if self._places is None else padded[self._places]


class _ShortAttention(torch.autograd.Function):
    """P = softmax(scale Q K^T + mask), O = P V."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], scale: float) -> Tensor:
        batch = _Batch(seqlens, k.shape[1], q.device)
        queries, keys, values = batch.matrices(q), batch.matrices(k), batch.matrices(v)
        later = q.new_full((batch.length, batch.length), -torch.inf).triu_(1)
        mask = later.repeat_interleave(q.shape[1] // k.shape[1], dim=0)
        p = F.softmax(torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale), dim=-1)
        ctx.save_for_backward(queries, keys, values, p)
        ctx.batch, ctx.scale = batch, scale
        return batch.tokens(torch.bmm(p, values))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        queries, keys, values, p = ctx.saved_tensors
        by_out = ctx.batch.matrices(grad)
        by_p = torch.bmm(by_out, values.transpose(1, 2))
        by_scores = torch._softmax_backward_data(by_p, p, -1, p.dtype).mul_(ctx.scale)
        by_q = torch.bmm(by_scores, keys)
        by_k = torch.bmm(by_scores.transpose(1, 2), queries)
        by_v = torch.bmm(p.transpose(1, 2), by_out)
        q, k, v = (ctx.batch.tokens(x) for x in (by_q, by_k, by_v))
        return q, k, v, None, None
