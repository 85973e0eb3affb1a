"""The plan of a refit's flat buckets: names, shapes, dtypes and byte offsets of the weights. Made once for a run."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from spmdrl.refit.layout import ParameterLayout, Split

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

    Weights that engines fuse stay together, otherwise the order is kept. A weight or fused group that is larger than
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
