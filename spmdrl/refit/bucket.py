"""The plan of a refit's flat buckets, names, shapes, dtypes and byte offsets of the weights, and what an engine must do
to receive them. A plan is made once for a run."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

# The layout of a sharded parameter: which part of the whole tensor each rank holds.


Interval = tuple[int, int]  # first index, end
Box = tuple[slice, ...]
IndexGrid = tuple[list[int], list[int], tuple[int | slice, ...]]  # see `ParameterLayout._grid`


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
            shape = [*map(_length, self._runs(rank))]
            local = part[: math.prod(shape)].view(shape)
            for place, source in self.boxes(rank):
                whole[place].copy_(local[source], non_blocking=True)

    def boxes(self, rank: int) -> Iterator[tuple[Box, Box]]:
        """Yield each box of indices that a rank holds: its place in the whole tensor, and in the rank's part."""
        for box in itertools.product(*map(_with_offsets, self._runs(rank))):
            yield (
                tuple(slice(start, end) for (start, end), _ in box),
                tuple(slice(offset, offset + end - start) for (start, end), offset in box),
            )

    def _runs(self, rank: int) -> list[list[Interval]]:
        """Return the indices of each dimension that a rank holds, as runs in the order of its memory."""
        runs: list[list[Interval]] = [[(0, size)] for size in self.shape]
        for number, split in enumerate(self.splits):
            inner = math.prod(later.num_ranks for later in self.splits[number + 1 :])
            if split.dim is not None:
                runs[split.dim] = list(_share(runs[split.dim], split, rank // inner % split.num_ranks))
        return runs

    def _grid(self) -> IndexGrid | None:
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


# Weights that engines fuse into one. Some loaders fail, or load garbage, when a bucket holds only some of them.
_LOADED_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor inside a flat bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int  # byte offset; a multiple of the dtype's size

    @property
    def num_bytes(self) -> int:
        """Size in bytes, without padding."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """View the tensor in the memory of its bucket, `flat` [num_bytes] uint8."""
        return flat[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of the policy, and the tensors that it is sent as."""

    name: str
    shape: torch.Size
    dtype: torch.dtype  # as sent
    splits: tuple[Split, ...]  # how it is split over the ranks of a copy; () where each rank has all of it
    sent_as: tuple[tuple[str, torch.Size], ...]  # its own name and shape, or those of a checkpoint's unfused parts

    @property
    def is_in_place(self) -> bool:
        """True when it is sent as it is, and not in a checkpoint's parts."""
        return self.sent_as == ((self.name, self.shape),)

    @property
    def layout(self) -> ParameterLayout:
        """The place of each rank's part in the weight."""
        return ParameterLayout(self.shape, self.splits)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Whole weights that are gathered and loaded together. `entries[i]` are the tensors of `weights[i]`."""

    weights: tuple[Weight, ...]
    entries: tuple[tuple[Entry, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries, which lie end to end."""
        last = self.entries[-1][-1]
        return last.start + last.num_bytes

    @property
    def flat_entries(self) -> list[Entry]:
        """All tensors in the bucket, in the order of their offsets."""
        return [entry for entries in self.entries for entry in entries]


def plan_buckets(weights: Iterable[Weight], *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Divide the weights into buckets of at most `bucket_bytes`.

    Weights that engines fuse stay together, otherwise the order stays. A weight or fused group that is larger than
    `bucket_bytes` has a bucket of its own.
    """
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(_fused_name(weight.name), []).append(weight)
    buckets: list[list[Weight]] = []
    room = 0
    for group in groups.values():
        size = sum(weight.shape.numel() * weight.dtype.itemsize for weight in group)
        if not buckets or size > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1] += group
        room -= size
    return tuple(_lay_out(bucket) for bucket in buckets)


def divide_frozen(weights: Sequence[Weight], frozen: Collection[str]) -> tuple[list[Weight], list[Weight]]:
    """Return (weights that may change, frozen ones). Weights that engines fuse are frozen only together."""
    changing = {_fused_name(weight.name) for weight in weights if weight.name not in frozen}
    is_changing = [_fused_name(weight.name) in changing for weight in weights]
    return list(compress(weights, is_changing)), list(compress(weights, map(operator.not_, is_changing)))


def bucket_of(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    """Plan one bucket for tensors that are not sharded."""
    return _lay_out([Weight(name, x.shape, x.dtype, (), ((name, x.shape),)) for name, x in tensors])


def _fused_name(name: str) -> str:
    """Name what is loaded together: weights that engines fuse, each with the scales of its blocks (`model/fp8.py`)."""
    name = name.removesuffix("_scale_inv")
    for names in _LOADED_TOGETHER:
        name = re.sub(rf"\b({'|'.join(names)})\b", "+".join(names), name)
    return name


def _lay_out(weights: Sequence[Weight]) -> Bucket:
    """Place weights end to end without gaps. Wider dtypes come first, so every tensor is aligned to its dtype."""
    ordered = sorted(weights, key=lambda weight: -weight.dtype.itemsize)
    entries, start = [], 0
    for weight in ordered:
        tensors = []
        for name, shape in weight.sent_as:
            tensors.append(Entry(name, shape, weight.dtype, start))
            start += math.prod(shape) * weight.dtype.itemsize
        entries.append(tuple(tensors))
    return Bucket(tuple(ordered), tuple(entries))


Naming = Literal["model", "checkpoint"]  # whose tensor names: the model's own, or those of its files


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """The adapters of one version of the policy, in one bucket of tensors with PEFT's names."""

    version: int
    config: Mapping[str, Any]  # PEFT's adapter_config.json
    bucket: Bucket
    flat: Tensor  # [bucket.num_bytes] uint8

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, as views of `flat`."""
        return {entry.name: entry.view(self.flat) for entry in self.bucket.flat_entries}

    @property
    def scale(self) -> float:
        """The factor of B A."""
        from spmdrl.model.lora.adapters import LoraScaling  # an engine without adapters needs no more than this file

        about = self.config
        return LoraScaling(rank=about["r"], alpha=about["lora_alpha"], rslora=about.get("use_rslora", False)).scale


class WeightSink(Protocol):
    """The receiving side of a refit.

    Every rank that holds a part of the engine makes the same calls in the same order: `begin_update`; `wait` and `load`
    for each bucket; `wait` and `end_update`; and, when the refit is verified, `differing`.
    """

    version: int  # the step whose weights are loaded; -1 before the first refit
    naming: Naming  # whose tensor names it loads
    device: torch.device  # of the memory that it allocates

    @property
    def has_weights(self) -> bool:
        """True from the end of an update until the engine gives its weights back or is started again."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate memory [num_bytes] uint8 for buckets."""
        ...

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        """Open a refit to `version`: the engine's weights are invalid until `end_update`.

        An engine that has weights keeps those that are in no bucket. Bucket i will be in buffers[i % len(buffers)]; all
        of them come from `allocate`.
        """
        ...

    def load(self, number: int) -> None:
        """Start to copy bucket `number`, which is in its buffer now; the buffer must stay as it is until `wait`."""
        ...

    def wait(self) -> None:
        """Return when the bucket last given to `load`, if any, has been copied."""
        ...

    def end_update(self) -> None:
        """Close the refit and drop every cache of the old weights. Raises when a parameter was not loaded."""
        ...

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        """Digest what this rank's part of the engine must hold after the bucket is loaded, under the engine's names."""
        ...

    def differing(self, expected: dict[str, str]) -> list[str]:
        """Return the names of weights whose digests differ from `expected`, or are missing in what was expected in this
        refit and those before.

        Ranks that do not lead the engine return an empty list.
        """
        ...

    def load_adapters(self, adapters: AdapterVersion) -> list[str]:
        """Take the adapters of a version, for the requests that are taken from now on; those of earlier versions stay
        as long as running requests need them.

        The adapters' memory may be written to again afterwards. Returns the names of tensors that the engine does not
        hold as they were given; on ranks that do not lead the engine none.
        """
        ...
