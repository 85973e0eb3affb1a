"""Attention in which a query's result depends only on itself and on the keys it sees, to the bit; see invariant.py.

Only sums over keys depend on an order: a query's scores do not, nor does the largest of them. So keys are summed in
tiles of a fixed size, counted from the start of the sequence, one tile after the other. A tile in which a query sees
nothing adds exactly 0, so the number of such tiles does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.attention_layer import AttentionLayer, CausalAttention, SeenKeys
from spmdrl.model.two_passes import with_gradient_of

KEYS = 32  # keys in a tile
_ROWS = 8  # products have a multiple of this many rows: kernels for small matrices sum in another order
_QUERIES = 4 * KEYS  # queries of a sequence computed together; later ones see more keys
_SCORES = 2**22  # limit on the scores in memory at a time, which also keeps them in the processor's cache


def attend_in_tiles(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], visible: Tensor) -> Tensor:
    """Attend with q [B, M, D], already scaled, under the mask visible [B or 1, M or 1, L]: [B, M, D].

    Keys and values are given in parts of [B, part of L, D]. All but `visible` are float32; M must be a multiple of 8
    and every part of L a multiple of KEYS. Every row must see some key.
    """
    sizes = [q.shape[1] % _ROWS, *(part.shape[1] % KEYS for part in keys)]
    assert not any(sizes), f"{q.shape[1]} rows and {[part.shape[1] for part in keys]} keys are not whole tiles"
    scores = torch.cat([torch.bmm(q, part.transpose(1, 2)) for part in keys], dim=-1).masked_fill(~visible, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    value_tiles = [tile for part in values for tile in part.split(KEYS, dim=1)]
    tiles = list(zip(weights.split(KEYS, dim=-1), value_tiles, strict=True))
    weighted, total = _tile_sums(*tiles[0])
    for tile in tiles[1:]:
        more_weighted, more = _tile_sums(*tile)
        weighted, total = weighted + more_weighted, total + more
    return weighted / total


def _tile_sums(weights: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(weights, v), weights.sum(-1, keepdim=True)


def attend_to_cache_in_tiles(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, seen: SeenKeys, sinks: Tensor | None
) -> Tensor:
    """Attend with one new token per cache row: query [1, H, n, D] over keys and values [n, K, L, D]; [1, n, H, D]."""
    assert sinks is None, "no model that true_on_policy = true accepts has attention sinks"
    num_rows, num_kv_heads, num_keys, _ = keys.shape
    num_groups = query.shape[1] // num_kv_heads
    q = _pad_to_multiple((query[0].transpose(0, 1).float() * scale).unflatten(1, (num_kv_heads, num_groups)), _ROWS)
    k, v = (_whole_tiles(x.flatten(0, 1)) for x in (keys, values))
    hidden = seen.hidden
    visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device=keys.device) if hidden is None else ~hidden
    visible = F.pad(visible, (0, -num_keys % KEYS)).repeat_interleave(num_kv_heads, dim=0)
    out = attend_in_tiles(q.flatten(0, 1), k, v, visible[:, None])
    out = out[:, :num_groups].reshape(1, num_rows, num_kv_heads * num_groups, -1)
    return out.to(query.dtype)


def _whole_tiles(x: Tensor) -> list[Tensor]:
    """Split x [B, L, D] of a cache into its whole tiles, without a copy, and a padded copy of the rest."""
    whole = x.shape[1] - x.shape[1] % KEYS
    parts = [x[:, :whole], _pad_to_multiple(x[:, whole:], KEYS)]
    return [part.float() for part in parts if part.shape[1]]


def _pad_to_multiple(x: Tensor, multiple: int) -> Tensor:
    """Append zeros to x [..., N, D] until N is a multiple."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % multiple))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbouring sequences whose lengths need the same number of tiles."""

    tokens: Tensor  # [n, L] int64, places in the micro-batch; padding repeats a sequence's last token
    is_real: Tensor  # [n, L] bool, False for padding


def causal_in_tiles(
    seqlens: list[int], earlier: int, plain: CausalAttention, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer
) -> Tensor:
    """`CausalAttention` within sequences of these lengths, exact to the bit; gradients are those of `plain`.

    The first sequence has `earlier` more keys than queries. Its tiles are those of the whole sequence, so it is
    computed as if it had their queries too.
    """
    assert layer.sinks is None, "no model that true_on_policy = true accepts has attention sinks"

    def differentiable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, layer)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = [earlier + seqlens[0], *seqlens[1:]]
        queries = F.pad(q, (0, 0, 0, 0, earlier, 0)) if earlier else q
        batches = _batches(whole, num_heads=q.shape[1], device=q.device)
        return torch.cat([_attend_in_batch(batch, queries, k, v, layer) for batch in batches])[earlier:]

    out: Tensor = with_gradient_of(differentiable, exact, q, k, v)
    return out


def _batches(seqlens: list[int], *, num_heads: int, device: torch.device) -> Iterator[_Batch]:
    """Split the sequences, in their order, into batches whose scores stay within _SCORES."""
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


def _attend_in_batch(batch: _Batch, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """Compute the rows of attention's result [T, H, D] that belong to the batch's tokens."""
    num_sequences, length = batch.tokens.shape
    num_kv_heads, num_groups = k.shape[1], q.shape[1] // k.shape[1]
    q_heads = (q[batch.tokens].float() * layer.scale).unflatten(2, (num_kv_heads, num_groups)).permute(0, 2, 1, 3, 4)
    q_heads = q_heads.flatten(0, 1)  # [n K, L, H / K, D]
    k_heads, v_heads = (x[batch.tokens].float().transpose(1, 2).flatten(0, 1) for x in (k, v))  # [n K, L, D]
    token = torch.arange(length, device=q.device)
    distance = token[:, None] - token
    visible = (distance >= 0) & (distance < (length if layer.window is None else layer.window))
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
