"""Packed sequences cut into chunks, as the rules of recurrent layers want them, and sums over their tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

_CHUNK_STEP = 8  # chunks are shorter where all sequences are, in multiples of this


@dataclass(frozen=True, slots=True)
class Chunks:
    """The N chunks of S packed sequences: first chunks, second chunks and so on, of the longest sequence first."""

    size: int  # C, tokens
    counts: list[int]  # of first chunks (S), of second chunks, and so on; N in all
    places: Tensor  # [T] int64, of each token among the N * C places
    order: Tensor  # [S] int64, sequences from the longest to the shortest
    ranks: Tensor  # [S] int64, of each sequence in `order`

    def lay_out(self, x: Tensor) -> Tensor:
        """[T, h, D] to float32 [N h, C, D], 0 where a chunk has no token."""
        rows = x.new_zeros(sum(self.counts) * self.size, *x.shape[1:], dtype=torch.float32)
        rows.index_copy_(0, self.places, x.float())
        return rows.unflatten(0, (-1, self.size)).transpose(1, 2).flatten(0, 1)

    def tokens(self, x: Tensor, num_heads: int) -> Tensor:
        """[N h, C, D] back to [T, h, D]."""
        return x.unflatten(0, (-1, num_heads)).transpose(1, 2).flatten(0, 1)[self.places]

    def steps(self, num_heads: int, first: int = 0) -> Iterator[slice]:
        """Yield the place of the first chunks in [N h, ...], of the second ones, and so on; or from the `first` on, and
        among these."""
        return (slice(*ends) for ends in pairwise(accumulate((n * num_heads for n in self.counts[first:]), initial=0)))

    def before(self, num_heads: int) -> Tensor:
        """Return the places in [N h, ...] of the chunks before those that are no first ones, [(N - S) h] int64."""
        places = [
            torch.arange(step.start, step.start + n * num_heads)
            for step, n in zip(self.steps(num_heads), self.counts[1:], strict=False)
        ]
        return torch.cat(places or [torch.arange(0)]).to(self.places.device)


@functools.lru_cache(maxsize=8)  # all layers ask for the same
@torch.inference_mode(mode=False)  # an engine may be the first to ask, and a trainer the second
def cut(seqlens: tuple[int, ...], most: int, device: torch.device) -> Chunks:
    """Cut sequences into chunks of at most `most` tokens, of fewer where all sequences are shorter."""
    lengths = torch.tensor(seqlens)
    size = min(most, -(-max(seqlens) // _CHUNK_STEP) * _CHUNK_STEP)
    order = lengths.argsort(descending=True, stable=True)
    ranks = order.argsort()
    num_chunks = -(-lengths // size)
    counts = [int((num_chunks > step).sum()) for step in range(int(num_chunks.max()))]
    starts = torch.tensor([*accumulate(counts, initial=0)])
    of_token = torch.arange(len(lengths)).repeat_interleave(lengths)
    position = torch.arange(sum(seqlens)) - (lengths.cumsum(0) - lengths)[of_token]
    places = (starts[position // size] + ranks[of_token]) * size + position % size
    return Chunks(size, counts, places.to(device), order.to(device), ranks.to(device))


def dot(x: Tensor, y: Tensor) -> Tensor:
    """[..., D] and [..., D] give [..., 1]."""
    return (x * y).sum(-1, keepdim=True)


def running_sums(x: Tensor) -> Tensor:
    """Sum x [B, C, 1] over each token and those before it. On CUDA torch's own sum has no deterministic form, so a
    deterministic run multiplies by a triangle of ones instead."""
    if not (x.is_cuda and torch.are_deterministic_algorithms_enabled()):
        return x.cumsum(1)
    return torch.matmul(torch.ones(x.shape[1], x.shape[1], device=x.device).tril_(), x)


def of_spans(pairs: Tensor) -> Tensor:
    """Sum what pairs [B, C, C] of a token and an earlier one have to do with each token's decay: [B, C, 1].

    That of token t is between tokens i and j where j < t <= i. Only those are summed: the difference of two larger sums
    would be all rounding where decay is fast.
    """
    size = pairs.shape[-1]
    from_here = torch.ones(size, size, device=pairs.device).triu_()
    return torch.matmul(from_here, pairs).tril_(-1).sum(-1, keepdim=True)
