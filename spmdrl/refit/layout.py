"""Where the part of a tensor that each rank holds lies in the whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

Interval = tuple[int, int]  # first index, end


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis of ranks over which a dimension is split.

    The indices that are left form `groups` runs of equal length; of each, every rank takes its share.
    """

    num_ranks: int
    dim: int | None  # None: these ranks hold the same
    groups: int = 1


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """A tensor of this shape, cut one axis after the other; the last axis numbers neighbouring ranks."""

    shape: torch.Size
    cuts: tuple[Cut, ...]

    @property
    def max_numel(self) -> int:
        """Elements on the rank with the most: the first one."""
        return math.prod(sum(end - start for start, end in runs) for runs in self._runs(0))

    def join(self, whole: Tensor, parts: Tensor) -> None:
        """Copy all ranks' parts [R, max_numel], padded at the end, to their places in `whole`."""
        if (grid := self._grid()) is not None:
            sizes, order, first = grid
            in_ranks = parts.view(*(cut.num_ranks for cut in self.cuts), -1)[first]
            to = whole.view(sizes).permute(order)
            to.copy_(in_ranks.reshape(to.shape), non_blocking=True)
            return
        for rank, part in enumerate(parts):
            self._place(whole, part, self._runs(rank))

    def _place(self, whole: Tensor, part: Tensor, runs: list[list[Interval]]) -> None:
        """Copy one rank's part to where its runs of indices are."""
        local_shape = [sum(end - start for start, end in of_dim) for of_dim in runs]
        local = part[: math.prod(local_shape)].view(local_shape)
        for places in itertools.product(*(list(_with_offsets(of_dim)) for of_dim in runs)):
            to = tuple(slice(start, end) for (start, end), _ in places)
            of = tuple(slice(offset, offset + end - start) for (start, end), offset in places)
            whole[to].copy_(local[of], non_blocking=True)

    def _runs(self, rank: int) -> list[list[Interval]]:
        """The indices of each dimension that a rank holds, as runs in the order of its memory."""
        runs: list[list[Interval]] = [[(0, size)] for size in self.shape]
        for number, cut in enumerate(self.cuts):
            inner = math.prod(later.num_ranks for later in self.cuts[number + 1 :])
            if cut.dim is not None:
                runs[cut.dim] = list(_share(runs[cut.dim], cut, rank // inner % cut.num_ranks))
        return runs

    def _grid(self) -> tuple[list[int], list[int], tuple[int | slice, ...]] | None:
        """How one strided copy does it, when all ranks hold equal boxes: (the whole's sizes with every axis of ranks as
        a dimension of its own, the order that puts these first, the index that leaves out ranks that hold the same).
        """
        sizes: list[int] = []
        place_of_cut: dict[int, int] = {}
        rest: list[int] = []  # places of what is left of each dimension
        for dim, size in enumerate(self.shape):
            cuts = [(number, cut) for number, cut in enumerate(self.cuts) if cut.dim == dim]
            outer: list[int] = []  # numbers of the cuts, from the one whose ranks are furthest apart
            for position, (number, cut) in reversed(list(enumerate(cuts))):
                later = math.prod(other.num_ranks for _, other in cuts[position + 1 :])
                if cut.groups not in (1, later):
                    return None
                outer = [*outer, number] if cut.groups > 1 else [number, *outer]
            num_ranks = math.prod(cut.num_ranks for _, cut in cuts)
            if size % num_ranks:
                return None
            for number in outer:
                place_of_cut[number] = len(sizes)
                sizes.append(self.cuts[number].num_ranks)
            rest.append(len(sizes))
            sizes.append(size // num_ranks)
        order = [place_of_cut[number] for number in range(len(self.cuts)) if number in place_of_cut] + rest
        first = tuple(0 if cut.dim is None else slice(None) for cut in self.cuts)
        return sizes, order, first


def cuts_of(tensor: Tensor, *, num_ranks: int) -> tuple[Cut, ...]:
    """How a sharded tensor is cut over the `num_ranks` that hold one copy of the model; () when each holds all of it.

    Where it lies on fewer axes than the ranks form, the innermost ranks hold the same.
    """
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    cuts = []
    for name, size, placement in zip(mesh.mesh_dim_names or (), mesh.shape, tensor.placements, strict=True):
        if name != "replicate":  # a copy lies on the ranks of one replica
            dim = None if placement.is_replicate() else placement.dim % tensor.ndim  # type: ignore[attr-defined]
            cuts.append(Cut(size, dim, getattr(placement, "split_factor", 1)))
    of_all = math.prod(cut.num_ranks for cut in cuts)
    return (*cuts, Cut(num_ranks // of_all, None)) if of_all < num_ranks else tuple(cuts)


def _share(runs: list[Interval], cut: Cut, rank: int) -> Iterator[Interval]:
    """Of indices that are left, those of one rank of an axis: its chunk of each group, as torch.chunk cuts."""
    total = sum(end - start for start, end in runs)
    group = math.ceil(total / cut.groups)
    for begin in range(0, total, group or 1):
        end = min(begin + group, total)
        chunk = math.ceil((end - begin) / cut.num_ranks)
        yield from _between(runs, min(begin + rank * chunk, end), min(begin + (rank + 1) * chunk, end))


def _between(runs: list[Interval], first: int, end: int) -> Iterator[Interval]:
    """The indices of a list of runs from its `first` to before its `end`."""
    for (start, stop), offset in _with_offsets(runs):
        low, high = max(first, offset), min(end, offset + stop - start)
        if low < high:
            yield start + low - offset, start + high - offset


def _with_offsets(runs: list[Interval]) -> Iterator[tuple[Interval, int]]:
    """Each run with the number of indices before it."""
    offset = 0
    for start, end in runs:
        yield (start, end), offset
        offset += end - start
