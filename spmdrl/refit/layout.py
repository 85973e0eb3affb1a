"""The layout of a sharded parameter: which part of the whole tensor each rank holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Interval = tuple[int, int]  # first index, end
Grid = tuple[list[int], list[int], tuple[int | slice, ...]]  # see `ParameterLayout._grid`


@dataclass(frozen=True, slots=True)
class Split:
    """One axis of ranks over which a dimension is split.

    The indices that earlier splits left form `groups` runs of equal length, and every rank takes its share of each.
    """

    num_ranks: int
    dim: int | None  # None: these ranks hold the same
    groups: int = 1


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """A tensor of this shape, split over one axis of ranks after another; the last axis numbers neighbouring ranks."""

    shape: torch.Size
    splits: tuple[Split, ...]

    @property
    def max_numel(self) -> int:
        """Number of elements on the rank with the most, which is the first one."""
        return math.prod(map(_length, self._runs(0)))

    def join(self, whole: Tensor, parts: Tensor) -> None:
        """Copy all ranks' parts [R, max_numel], padded at the end, to their places in `whole`."""
        if (grid := self._grid()) is not None:
            sizes, order, first = grid
            by_rank = parts.view(*(split.num_ranks for split in self.splits), -1)[first]
            to = whole.view(sizes).permute(order)
            to.copy_(by_rank.reshape(to.shape), non_blocking=True)
            return
        for rank, part in enumerate(parts):
            self._place(whole, part, self._runs(rank))

    def _place(self, whole: Tensor, part: Tensor, runs: list[list[Interval]]) -> None:
        """Copy one rank's part to the indices in its `runs`, one list for each dimension."""
        local_shape = [*map(_length, runs)]
        local = part[: math.prod(local_shape)].view(local_shape)
        for box in itertools.product(*map(_with_offsets, runs)):
            to = tuple(slice(start, end) for (start, end), _ in box)
            source = tuple(slice(offset, offset + end - start) for (start, end), offset in box)
            whole[to].copy_(local[source], non_blocking=True)

    def _runs(self, rank: int) -> list[list[Interval]]:
        """Return the indices of each dimension that a rank holds, as runs in the order of its memory."""
        runs: list[list[Interval]] = [[(0, size)] for size in self.shape]
        for number, split in enumerate(self.splits):
            inner = math.prod(later.num_ranks for later in self.splits[number + 1 :])
            if split.dim is not None:
                runs[split.dim] = list(_share(runs[split.dim], split, rank // inner % split.num_ranks))
        return runs

    def _grid(self) -> Grid | None:
        """Return the arguments of a single strided copy, or None when the ranks do not hold equal boxes.

        They are: the sizes of the whole with each axis of ranks as a dimension of its own, the order of dimensions that
        puts these axes first, and the index that skips ranks which hold the same.
        """
        sizes: list[int] = []
        place_of_split: dict[int, int] = {}
        remaining: list[int] = []  # places of the dimensions inside one rank
        for dim, size in enumerate(self.shape):
            splits = [(number, split) for number, split in enumerate(self.splits) if split.dim == dim]
            outer: list[int] = []  # numbers of the splits, from the one whose ranks hold indices furthest apart
            for position, (number, split) in reversed(list(enumerate(splits))):
                later = math.prod(other.num_ranks for _, other in splits[position + 1 :])
                if split.groups not in (1, later):
                    return None
                outer = [*outer, number] if split.groups > 1 else [number, *outer]
            num_ranks = math.prod(split.num_ranks for _, split in splits)
            if size % num_ranks:
                return None
            for number in outer:
                place_of_split[number] = len(sizes)
                sizes.append(self.splits[number].num_ranks)
            remaining.append(len(sizes))
            sizes.append(size // num_ranks)
        order = [place_of_split[number] for number in range(len(self.splits)) if number in place_of_split] + remaining
        first = tuple(0 if split.dim is None else slice(None) for split in self.splits)
        return sizes, order, first


def splits_of(tensor: Tensor, *, num_ranks: int) -> tuple[Split, ...]:
    """Return how a tensor is split over the `num_ranks` that hold one copy of the model; () when each holds all of it.

    A tensor on fewer ranks than that is repeated on the innermost ranks.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    splits = []
    for name, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, tensor.placements, strict=True):
        if name != "replicate":  # the ranks of one replica hold a copy
            dim = None if placement.is_replicate() else placement.dim % tensor.ndim  # type: ignore[attr-defined]
            splits.append(Split(size, dim, getattr(placement, "split_factor", 1)))
    num_parts = math.prod(split.num_ranks for split in splits)
    return (*splits, Split(num_ranks // num_parts, None)) if num_parts < num_ranks else tuple(splits)


def _share(runs: list[Interval], split: Split, rank: int) -> Iterator[Interval]:
    """Yield one rank's share of the remaining indices: its chunk of each group, divided as torch.chunk divides."""
    total = _length(runs)
    group = math.ceil(total / split.groups)
    for begin in range(0, total, group or 1):
        end = min(begin + group, total)
        chunk = math.ceil((end - begin) / split.num_ranks)
        yield from _between(runs, min(begin + rank * chunk, end), min(begin + (rank + 1) * chunk, end))


def _between(runs: list[Interval], first: int, end: int) -> Iterator[Interval]:
    """Yield the part of the runs from their index number `first` to before number `end`."""
    for (start, stop), offset in _with_offsets(runs):
        low, high = max(first, offset), min(end, offset + stop - start)
        if low < high:
            yield start + low - offset, start + high - offset


def _with_offsets(runs: list[Interval]) -> Iterator[tuple[Interval, int]]:
    """Yield each run with the number of indices before it."""
    offset = 0
    for start, end in runs:
        yield (start, end), offset
        offset += end - start


def _length(runs: list[Interval]) -> int:
    return sum(end - start for start, end in runs)
