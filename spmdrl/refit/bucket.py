"""How weights lie in the flat buckets that travel: names, shapes, types and places in bytes. Made once for a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.refit.layout import Cut, ParameterLayout

# Weights that engines fuse into one. Some loaders fail, or load rubbish, when a bucket brings only part of them.
_LOADED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor inside a flat bucket."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int  # byte offset; a multiple of the dtype's size

    @property
    def num_bytes(self) -> int:
        """Bytes it fills, without padding."""
        return self.shape.numel() * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """The tensor itself, in the memory of its bucket [num_bytes] uint8."""
        return flat[self.start : self.start + self.num_bytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of the policy, and the tensors that it is sent as."""

    name: str
    shape: torch.Size
    dtype: torch.dtype  # that it is sent in
    cuts: tuple[Cut, ...]  # how it is split over the ranks of a copy; () where each has all of it
    sent_as: tuple[tuple[str, torch.Size], ...]  # its own name and shape, or those of a checkpoint's unfused parts

    @property
    def layout(self) -> ParameterLayout:
        """Where each rank's part lies in it."""
        return ParameterLayout(self.shape, self.cuts)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Whole weights that are gathered and loaded together. `entries[i]` are the places of `weights[i]`'s tensors."""

    weights: tuple[Weight, ...]
    entries: tuple[tuple[Entry, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries; they lie end to end."""
        last = self.entries[-1][-1]
        return last.start + last.num_bytes

    @property
    def flat_entries(self) -> list[Entry]:
        """Every tensor in the bucket, in the order of their places."""
        return [entry for entries in self.entries for entry in entries]


def plan_buckets(weights: Iterable[Weight], *, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut the weights into buckets of at most `bucket_bytes`; a bucket is larger only when one weight, or one group
    that engines fuse, is. Their order is kept but for that."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(_group(weight.name), []).append(weight)
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


def bucket_of(tensors: Sequence[tuple[str, Tensor]]) -> Bucket:
    """One bucket for tensors that are whole already."""
    return _lay_out([Weight(name, x.shape, x.dtype, (), ((name, x.shape),)) for name, x in tensors])


def _group(name: str) -> str:
    for names in _LOADED_TOGETHER:
        name = re.sub(rf"\b({'|'.join(names)})\b", "+".join(names), name)
    return name


def _lay_out(weights: Sequence[Weight]) -> Bucket:
    """End to end without gaps: wider types come first, so every tensor is aligned to its type."""
    ordered = sorted(weights, key=lambda weight: -weight.dtype.itemsize)
    entries, start = [], 0
    for weight in ordered:
        places = []
        for name, shape in weight.sent_as:
            places.append(Entry(name, shape, weight.dtype, start))
            start += math.prod(shape) * weight.dtype.itemsize
        entries.append(tuple(places))
    return Bucket(tuple(ordered), tuple(entries))
