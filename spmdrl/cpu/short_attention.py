"""Causal attention of short sequences on a CPU: many sequences in one call, in C or as plain products.

torch's fused kernel works on one sequence and one head at a time; below some hundred tokens its overhead is most of
what it does. In C sequences may have any lengths; without a compiler a batch of sequences is two products. Backward
computes the probabilities again, so that it saves no more than other kernels.

For products, sequences of similar lengths form a batch, padded at their ends. No query sees the padding of its own
sequence, because it comes later, so the results are exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.cpu import kernels_c
from spmdrl.cpu.kernels_c import serves
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.cpu_room import EqualLengths

MAX_TOKENS = 128  # of a sequence; at this length the fused kernel takes as long
_MAX_SCORES = 2**22  # numbers in one batch, which exist for a moment
_MAX_PADDED = 1.25  # times the tokens of a batch: more calls cost more than this much more work


def batches_of_similar_length(seqlens: Sequence[int], limit: int, *, num_heads: int) -> Iterator[list[int]]:
    """Group neighbouring sequences, in their order; those longer than `limit` only with others of equal length."""
    batch: list[int] = []
    longest = total = 0
    for length in seqlens:
        longest_then = max(longest, length)
        is_padded_too_much = longest_then * (len(batch) + 1) > _MAX_PADDED * (total + length)
        is_mixed = longest_then > limit and length != longest
        is_too_large = longest_then <= limit and (len(batch) + 1) * num_heads * longest_then**2 > _MAX_SCORES
        if batch and (is_padded_too_much or is_mixed or is_too_large):
            yield batch
            batch, longest, total = [], 0, 0
        batch.append(length)
        longest, total = max(longest, length), total + length
    if batch:
        yield batch


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], layer: AttentionLayer, equal_lengths: EqualLengths
) -> Tensor:
    """Attend within sequences: short ones together, where they are faster so, and others by `equal_lengths`.

    q is [T, H, D], k and v [T, K, D], as many keys as queries, and no sinks; the result is [T, H, D].
    """
    limit = MAX_TOKENS if layer.window is None else min(MAX_TOKENS, layer.window)
    if max(seqlens) <= limit and serves(q, k, v):
        return attend_short(q, k, v, seqlens, layer.scale)
    outputs, start = [], 0
    for batch in batches_of_similar_length(seqlens, limit, num_heads=q.shape[1]):
        tokens = slice(start, start + sum(batch))
        start = tokens.stop
        part = (q[tokens], k[tokens], v[tokens])
        is_short = max(batch) <= limit
        outputs.append(attend_short(*part, batch, layer.scale) if is_short else equal_lengths(*part, len(batch), layer))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def attend_short(q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """Causal attention within sequences: q [T, H, D], k and v [T, K, D] with K dividing H give [T, H, D]."""
    return _short_attention(q, k, v, seqlens, scale)


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


def _probabilities(queries: Tensor, keys: Tensor, length: int, scale: float) -> Tensor:
    """softmax(scale Q K^T) without later keys: queries [B, L G, D] and keys [B, L, D] give [B, L G, L]."""
    later = queries.new_full((length, length), -torch.inf).triu_(1)
    mask = later.repeat_interleave(queries.shape[1] // length, dim=0)
    return F.softmax(torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale), dim=-1)


# An operator of its own, so that selective checkpointing keeps its result and not the scores inside.
@torch.library.custom_op("spmdrl::short_attention", mutates_args=())
def _short_attention(q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """P = softmax(scale Q K^T + mask), O = P V."""
    if serves(q, k, v):
        return kernels_c.attend(q, k, v, seqlens, scale)
    batch = _Batch(seqlens, k.shape[1], q.device)
    p = _probabilities(batch.matrices(q), batch.matrices(k), batch.length, scale)
    return batch.tokens(torch.bmm(p, batch.matrices(v)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.seqlens, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, v = ctx.saved_tensors
    if serves(grad, q, k, v):
        return *kernels_c.attend_backward(grad, q, k, v, ctx.seqlens, ctx.scale), None, None
    batch = _Batch(ctx.seqlens, k.shape[1], grad.device)
    queries, keys, values = (batch.matrices(x) for x in (q, k, v))
    by_out = batch.matrices(grad)
    p = _probabilities(queries, keys, batch.length, ctx.scale)
    by_v = torch.bmm(p.transpose(1, 2), by_out)
    by_p = torch.bmm(by_out, values.transpose(1, 2))
    by_scores = torch._softmax_backward_data(by_p, p, -1, p.dtype).mul_(ctx.scale)
    by_q, by_k = torch.bmm(by_scores, keys), torch.bmm(by_scores.transpose(1, 2), queries)
    q, k, v = (batch.tokens(x) for x in (by_q, by_k, by_v))
    return q, k, v, None, None


_short_attention.register_autograd(_backward, setup_context=_keep)
