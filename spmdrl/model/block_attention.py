"""Attention that is causal except in blocks, such as images, whose tokens see each other.

The queries of a block see all keys from the beginning of their sequence to the end of the block; in a layer with a
window, those that are not too far behind them. All other queries are causal. So a causal kernel computes all rows, and
the rows of blocks are computed again and put in their places.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.attention_layer import AttentionLayer, CausalAttention
from spmdrl.model.kernels import Kernel
from spmdrl.types import UserError

Block = tuple[int, int]  # its first token, and the first after it


class _View(NamedTuple):
    """A block and the tokens before it that it sees."""

    first: int  # token that it sees
    start: int  # its own first token
    end: int  # the first token after it


def seeing_blocks(
    causal: CausalAttention, seqlens: Sequence[int], blocks: Sequence[Block], kernel: Kernel
) -> CausalAttention:
    """Let the tokens of each block see each other; `causal` is the attention of packed sequences of these lengths.

    Raises UserError for a kernel that cannot.
    """
    if kernel not in ("sdpa", "varlen"):
        raise UserError(
            f'model.attention = "{kernel}" cannot let the tokens of an image see each other, as this model does; set '
            'it to "auto", "varlen" or "sdpa"'
        )
    starts = [*accumulate(seqlens, initial=0)]
    beginnings = [max(start for start in starts if start <= block[0]) for block in blocks]
    rows = torch.cat([torch.arange(*block) for block in blocks])
    rows_on = functools.cache(rows.to)

    @functools.cache
    def views(window: int | None) -> list[_View]:
        """The views of a layer with this window: nothing that no token of the block sees."""
        before = [0 if window is None else block[0] - window + 1 for block in blocks]
        return [_View(max(found), *block) for *found, block in zip(beginnings, before, blocks, strict=True)]

    @functools.cache
    def whole(window: int | None, device: torch.device) -> _Attend:
        if kernel == "sdpa":
            return functools.partial(_one_by_one, views(window))
        return _Together(views(window), device)

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        assert layer.sinks is None, "no model that sees images has attention sinks"
        again = whole(layer.window, q.device)(q, k, v, layer)
        return causal(q, k, v, layer).index_copy(0, rows_on(q.device), again)

    return attend


_Attend = Callable[[Tensor, Tensor, Tensor, AttentionLayer], Tensor]  # to the rows of all blocks, [N, H, D]


def _one_by_one(views: Sequence[_View], q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """Call sdpa once for each block."""
    parts = []
    for first, start, end in views:
        visible = None
        if layer.window is not None:
            keys = torch.arange(first, end, device=q.device)
            visible = keys > torch.arange(start, end, device=q.device)[:, None] - layer.window
        query, key, value = (x.transpose(0, 1)[None] for x in (q[start:end], k[first:end], v[first:end]))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, visible, scale=layer.scale, enable_gqa=grouped)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


class _Together:
    """One call of torch's varlen kernel, in which the blocks are sequences with more keys than queries."""

    def __init__(self, views: Sequence[_View], device: torch.device) -> None:
        queries, keys = [end - start for _, start, end in views], [end - first for first, _, end in views]
        self._max_queries, self._max_keys = max(queries), max(keys)
        self._cu_queries, self._cu_keys = (
            torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
            for lengths in (queries, keys)
        )
        self._queries = torch.cat([torch.arange(start, end) for _, start, end in views]).to(device)
        self._keys = torch.cat([torch.arange(first, end) for first, _, end in views]).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        groups = q.shape[1] // k.shape[1]  # repeated, as in kernels.py
        k, v = (x[self._keys] for x in (k, v))
        k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
        # The last query and the last key of a block are the same token.
        window = (-1, -1) if layer.window is None else (layer.window - 1, self._max_queries)
        lengths = (self._cu_queries, self._cu_keys, self._max_queries, self._max_keys)
        out = varlen_attn(q[self._queries], k, v, *lengths, scale=layer.scale, window_size=window)
        assert isinstance(out, Tensor)
        return out
