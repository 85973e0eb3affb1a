"""Causal attention over prefix trees: each token sees those before it in its node, and all of the nodes above.

Depth first, the descendants of a node are neighbours. So, for a kernel that is not causal, a node is the keys of one
sequence and its descendants are the queries; nodes of the same depth are the sequences of one call. One causal call
computes what nodes see of themselves. The results are weighed by their normalizers (`attention_layer.py`), and there is
no mask.

Where a layer has a window, the kernel returns no normalizer, or a rank has only a chunk of the rows, each node gets a
copy of the keys that it sees above, and one call computes sequences that have more keys than queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from spmdrl.families import vision_family
from spmdrl.model import plain_attention
from spmdrl.model.attention_layer import AttentionLayer, CausalAttention, NormalizerKernel, Part, attention_in_parts
from spmdrl.model.kernels import (
    FlashWithNormalizer,
    Kernel,
    Offsets,
    SequenceLayout,
    causal_attention,
    cumulative,
    for_varlen,
    has_flash,
    offsets_of,
)
from spmdrl.model.plain_attention import ScoreRule
from spmdrl.model.rotary import changes_after
from spmdrl.types import PrefixTree


def tree_problems(model_config: Any, longest: int) -> Iterator[str]:
    """Yield a sentence when sequences of up to `longest` tokens of this model cannot share what they begin with."""
    kind, family, limit = model_config.model_type, vision_family(model_config), changes_after(model_config)
    reasons = {
        "lets the tokens of an image see each other": family is not None and family.sees_whole_images,
        f"gives sequences beyond {limit} tokens other rotary frequencies": limit is not None and longest > limit,
    }
    for reason, holds in reasons.items():
        if holds:
            yield f'pack.prefix_tree = "auto", but {kind} {reason}; set it to "off"'


TokenRange = tuple[int, int]  # rows, from the first to the one after the last


def tree_attention(tree: PrefixTree, kernel: Kernel, device: torch.device) -> CausalAttention:
    """Let each of the tree's tokens see those before it in its sequences: q [U, H, D], k and v [U, K, D]."""
    levels = [_Level(spans, device) for spans in _levels(tree)]

    @functools.cache
    def copied(window: int | None) -> tuple[CausalAttention, Tensor]:
        """Attention of nodes with more keys than queries, and the rows that are these keys."""
        layout, keys = chunk_of_tree(tree, (0, len(tree.tokens)), window, device)
        return causal_attention(layout, kernel), keys.to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        if layer.window is not None or kernel not in ("sdpa", "varlen"):
            causal, keys = copied(layer.window)
            return causal(q, k[keys], v[keys], layer)
        make: Callable[[_Level], NormalizerKernel] = functools.partial(_Products, layer=layer)
        if kernel == "varlen" and has_flash(kernel, q.shape[-1], layer):
            make = functools.partial(_flash, layer=layer)
            k, v, _ = for_varlen(q, k, v)
        itself, *above = levels
        parts = [Part(make(level), level.queries, level.keys) for level in above]
        return attention_in_parts(q, k, v, layer.sinks, make(itself), parts)

    return attend


def _levels(tree: PrefixTree) -> Iterator[list[tuple[TokenRange, TokenRange]]]:
    """Yield pairs of queries and keys: first each node and itself, then of each depth, descendants and their node."""
    starts = [*accumulate(tree.lengths, initial=0)]
    nodes = [*pairwise(starts)]
    yield [(node, node) for node in nodes]
    ends = [end for _, end in nodes]
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    for node in reversed(range(len(nodes))):
        if (parent := tree.parents[node]) >= 0:
            ends[parent] = max(ends[parent], ends[node])
    for depth in range(max(depths)):
        spans = zip(nodes, ends, depths, strict=True)
        yield [((node[1], end), node) for node, end, its_depth in spans if its_depth == depth and end > node[1]]


def _rows(spans: Sequence[TokenRange]) -> Tensor:
    return torch.cat([torch.arange(*span) for span in spans])


def chunk_of_tree(
    tree: PrefixTree, chunk: TokenRange, window: int | None, device: torch.device
) -> tuple[SequenceLayout, Tensor]:
    """Return a chunk of the rows as sequences, one for each node that has a part in it, and the rows of their keys.

    The keys, [L] int64 on the host, are those of the part and as many before it as a window lets its queries see: rows
    of the same node, then of those above it. None of them comes after the chunk.
    """
    starts = [*accumulate(tree.lengths, initial=0)]
    queries, earlier, keys = [], [], []
    for node in range(len(tree.parents)):
        first, end = max(starts[node], chunk[0]), min(starts[node + 1], chunk[1])
        if first >= end:
            continue
        spans, missing = [(first, end)], first if window is None else window - 1
        above, edge = node, first
        while above >= 0 and missing:
            seen = max(starts[above], edge - missing)
            spans.insert(0, (seen, edge))
            missing -= edge - seen
            above = tree.parents[above]
            edge = starts[above + 1]
        keys.append(_rows(spans))
        queries.append(end - first)
        earlier.append(len(keys[-1]) - queries[-1])
    return SequenceLayout(queries, cumulative(queries, device), earlier), torch.cat(keys)


@dataclass(frozen=True, slots=True)
class _Side:
    """The queries of a batch of pairs, or the keys: as many for each pair, padded at the end."""

    rows: Tensor  # int64, among the level's
    places: Tensor  # int64, of the rows among the count x longest
    count: int
    longest: int

    @classmethod
    def of(cls, spans: Sequence[TokenRange], device: torch.device) -> _Side:
        lengths = [end - start for start, end in spans]
        longest = max(lengths)
        places = _rows([(pair * longest, pair * longest + length) for pair, length in enumerate(lengths)])
        return cls(_rows(spans).to(device), places.to(device), len(spans), longest)

    def lay_out(self, x: Tensor) -> Tensor:
        """[T, H, D] to [count, H, longest, D], 0 where padded."""
        padded = x.new_zeros(self.count * self.longest, *x.shape[1:]).index_copy_(0, self.places, x[self.rows])
        return padded.unflatten(0, (self.count, -1)).transpose(1, 2)

    def put(self, x: Tensor, into: Tensor) -> None:
        """Put [count, H, longest, D] into their rows of [T, H, D]."""
        into[self.rows] = x.transpose(1, 2).flatten(0, 1)[self.places]


class _Level:
    """The calls of one depth: queries and keys in the order of the tree, and how they form sequences."""

    def __init__(self, pairs: list[tuple[TokenRange, TokenRange]], device: torch.device) -> None:
        self.is_causal = pairs[0][0] == pairs[0][1]
        self.lengths = [(last - first, end - start) for (first, last), (start, end) in pairs]
        self.queries, self.keys = (_rows([pair[of] for pair in pairs]).to(device) for of in (0, 1))
        self.device = device

    @functools.cached_property
    def offsets(self) -> Offsets:
        """The offsets of its sequences, for kernels."""
        queries, keys = map(list, zip(*self.lengths, strict=True))
        return offsets_of(queries, keys, cumulative(queries, self.device))

    @functools.cached_property
    def batches(self) -> list[tuple[_Side, _Side]]:
        """Its sequences in batches, for products."""
        return [(self._side(0, places), self._side(1, places)) for places in _alike(self.lengths, self.is_causal)]

    def _side(self, of: int, places: list[int]) -> _Side:
        spans = [*pairwise(accumulate((pair[of] for pair in self.lengths), initial=0))]
        return _Side.of([spans[place] for place in places], self.device)


_MAX_PADDED = 1.25  # queries of a batch, of those of its pairs


def _alike(lengths: list[tuple[int, int]], is_causal: bool) -> Iterator[list[int]]:
    """Group the places of pairs with about the same number of queries; of keys, where they are not causal, the same."""
    batch: list[int] = []
    total = 0
    order = sorted(range(len(lengths)), key=lambda place: (0 if is_causal else lengths[place][1], lengths[place][0]))
    for place in order:
        queries, keys = lengths[place]
        is_other = batch and not is_causal and lengths[batch[0]][1] != keys
        if batch and (is_other or queries * (len(batch) + 1) > _MAX_PADDED * (total + queries)):
            yield batch
            batch, total = [], 0
        batch.append(place)
        total += queries
    yield batch


@dataclass(frozen=True, slots=True)
class _Products:
    """A level's attention by matrix products: a `NormalizerKernel`."""

    level: _Level
    layer: AttentionLayer

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), plain_attention.wide(q.new_empty(*q.shape[:2], 1))
        for queries, keys in self.level.batches:
            found, normalizers = plain_attention.attend(
                queries.lay_out(q), keys.lay_out(k), keys.lay_out(v), self._scores()
            )
            queries.put(found, out)
            queries.put(normalizers[..., None], lse)
        return out, lse.squeeze(-1).t().contiguous()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        by_q, by_k, by_v = map(torch.empty_like, (q, k, v))
        for queries, keys in self.level.batches:
            of_batch = plain_attention.attend_backward(
                queries.lay_out(grad),
                queries.lay_out(q),
                keys.lay_out(k),
                keys.lay_out(v),
                queries.lay_out(out),
                queries.lay_out(lse.t()[..., None]).squeeze(-1),
                self._scores(),
            )
            for side, found, into in zip((queries, keys, keys), of_batch, (by_q, by_k, by_v), strict=True):
                side.put(found, into)
        return by_q, by_k, by_v

    def _scores(self) -> ScoreRule:
        return ScoreRule(self.layer.scale, self.layer.softcap, is_causal=self.level.is_causal)


def _flash(level: _Level, layer: AttentionLayer) -> NormalizerKernel:
    return FlashWithNormalizer(level.offsets, layer, sees_all=not level.is_causal)
