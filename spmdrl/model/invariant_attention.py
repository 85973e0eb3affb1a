"""Attention in which a query's result depends on itself and on the keys it sees, to the bit; see invariant.py.

Scores of a query are one number for each key, and the largest of them is what it is in any order. Only what is summed
over keys has an order: tiles of a fixed number of keys, counted from the start of the sequence, are summed one after
the other. A tile in which a query sees nothing adds exactly 0, so that it does not matter how many of them there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.two_passes import with_gradient_of

KEYS = 32  # of a tile
_ROWS = 8  # a product has a multiple of so many rows; of fewer, kernels for small matrices take another order
_QUERIES = 4 * KEYS  # of a sequence that are computed together: those after them see keys that these do not
_SCORES = 2**22  # most scores that exist at the same time, so that they stay in the cache and memory is bounded


def attend_in_tiles(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible: Tensor) -> Tensor:
    """q [B, M, D], already scaled, visible [B or 1, M or 1, L]; gives [B, M, D].

    Keys and values come in parts of [B, part of L, D]. All but `visible` are float32; M must be a multiple of 8 and
    every part of L one of KEYS. Every row must see some key.
    """
    sizes = [q.shape[1] % _ROWS, *(part.shape[1] % KEYS for part in keys)]
    assert not any(sizes), f"{q.shape[1]} rows and {[part.shape[1] for part in keys]} keys are not whole tiles"
    scores = torch.cat([torch.bmm(q, part.transpose(1, 2)) for part in keys], dim=-1).masked_fill(~visible, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    value_tiles = [tile for part in values for tile in part.split(KEYS, dim=1)]
    tiles = list(zip(weights.split(KEYS, dim=-1), value_tiles, strict=True))
    weighted, total = _of_tile(*tiles[0])
    for tile in tiles[1:]:
        more_weighted, more = _of_tile(*tile)
        weighted, total = weighted + more_weighted, total + more
    return weighted / total


def _of_tile(weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(weights, v), weights.sum(-1, keepdim=True)


def attend_to_cache_in_tiles(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, hidden: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """query [1, H, n, D], one token for each row of keys and values [n, K, L, D], hidden [n, L]: [1, n, H, D]."""
    assert sinks is None, "no model that true_on_policy = true accepts has attention sinks"
    num_rows, num_kv_heads, num_keys, _ = keys.shape
    num_groups = query.shape[1] // num_kv_heads
    q = _fill_up((query[0].transpose(0, 1).float() * scale).unflatten(1, (num_kv_heads, num_groups)), _ROWS)
    k, v = (_parts(x.flatten(0, 1)) for x in (keys, values))
    visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device=keys.device) if hidden is None else ~hidden
    visible = F.pad(visible, (0, -num_keys % KEYS)).repeat_interleave(num_kv_heads, dim=0)
    out = attend_in_tiles(q.flatten(0, 1), k, v, visible[:, None])
    out = out[:, :num_groups].reshape(1, num_rows, num_kv_heads * num_groups, -1)
    return out.to(query.dtype)


def _parts(x: Tensor) -> list[Tensor]:
    """x [B, L, D] of a cache as whole tiles: those it has, as they lie, and a copy of the rest that is filled up."""
    whole = x.shape[1] - x.shape[1] % KEYS
    parts = [x[:, :whole], _fill_up(x[:, whole:], KEYS)]
    return [part.float() for part in parts if part.shape[1]]


def _fill_up(x: Tensor, multiple: int) -> Tensor:
    """x [..., N, D] with zeros after it, so that N is a multiple."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % multiple))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbouring sequences whose lengths need the same number of tiles, side by side."""

    tokens: Tensor  # [n, L] int64, places in the pack; after the end of a sequence its last token again
    is_real: Tensor  # [n, L] bool, False after the end


def causal_in_tiles(
    seqlens: list[int],
    plain: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """`CausalAttention` within each of the sequences that lie end to end; its gradient is that of `plain`, another."""
    assert sinks is None, "no model that true_on_policy = true accepts has attention sinks"

    def differentiable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, scale=scale, window=window, sinks=None)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batches = _batches(seqlens, num_heads=q.shape[1], device=q.device)
        return torch.cat([_in_batch(batch, q, k, v, scale=scale, window=window) for batch in batches])

    out: Tensor = with_gradient_of(differentiable, exact, q, k, v)
    return out


def _batches(seqlens: list[int], *, num_heads: int, device: torch.device) -> Iterator[_Batch]:
    """All sequences, in their order, cut so that the scores of no batch are more than there should be."""
    start = 0
    for length, run in groupby(seqlens, key=lambda seqlen: -(-seqlen // KEYS) * KEYS):
        lengths = list(run)
        most = max(1, _SCORES // (num_heads * min(length, _QUERIES) * length))
        for first in range(0, len(lengths), most):
            ends = torch.tensor(lengths[first : first + most], device=device)
            starts = start + ends.cumsum(0) - ends
            place = torch.arange(length, device=device)
            is_real = place < ends[:, None]
            yield _Batch(starts[:, None] + torch.minimum(place, ends[:, None] - 1), is_real)
            start += sum(lengths[first : first + most])


def _in_batch(batch: _Batch, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """The rows of attention's result [T, H, D] that belong to the batch's tokens."""
    num_sequences, length = batch.tokens.shape
    num_kv_heads, num_groups = k.shape[1], q.shape[1] // k.shape[1]
    q_heads = (q[batch.tokens].float() * scale).unflatten(2, (num_kv_heads, num_groups)).permute(0, 2, 1, 3, 4)
    q_heads = q_heads.flatten(0, 1)  # [n K, L, H / K, D]
    k_heads, v_heads = (x[batch.tokens].float().transpose(1, 2).flatten(0, 1) for x in (k, v))  # [n K, L, D]
    token = torch.arange(length, device=q.device)
    distance = token[:, None] - token
    visible = (distance >= 0) & (distance < (length if window is None else window))
    parts = []
    for first in range(0, length, _QUERIES):
        block = slice(first, min(first + _QUERIES, length))
        seen = slice(0, block.stop)
        out = attend_in_tiles(
            q_heads[:, block].flatten(1, 2),
            [k_heads[:, seen]],
            [v_heads[:, seen]],
            visible[block, seen].repeat_interleave(num_groups, dim=0)[None],
        )
        parts.append(out.unflatten(1, (-1, num_groups)))
    out = torch.cat(parts, dim=1).unflatten(0, (num_sequences, num_kv_heads))  # [n, K, L, H / K, D]
    return out.permute(0, 2, 1, 3, 4).flatten(2, 3)[batch.is_real].to(q.dtype)
