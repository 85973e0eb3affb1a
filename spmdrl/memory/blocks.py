"""Bytes that torch's caching allocator reserves on a device for the forward and backward passes of one model.

The allocator cuts blocks from segments of the device's memory, and what one stream has freed serves no other stream.
FSDP works on three: weights are gathered on one, gradients are reduced and stay on another, and all else is on the
stream that computes. The first two take and free the same sizes in every pass, so their segments are found by doing so
(`Blocks`). On the third, what stays is placed in the same way; of what is allocated and freed, the fullest moment is
known, and these come in addition:

    sum of the root     the float32 gradients of the weights outside the layers, laid end to end to be reduced: no
                        segment of activations is large enough, and it is needed when the activations are gone
    embedding           its gradient, while the head's waits, where no activation has as large a segment
    second sum          with one rank and "none", the embedding's gradient may be cut from the segment of the sum, which
                        the next micro-batch then needs again
    unused              parts of blocks into which no tensor fits: a share of what is allocated and freed. Layers leave
                        blocks of the widths A and I to what is saved of width D: what remains of them counts too
    gradients           less than `activations.py` counts for a layer without experts: not all are there at once

The shares are fitted to what `benchmarks/memory_plan.py` has measured.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from spmdrl.memory.activations import Level

_MIB = 2**20
_SMALLEST = 512
_SMALL = _MIB  # up to this, blocks come from segments of 2 MiB
_MEDIUM = 10 * _MIB  # up to this, from segments of 20 MiB; larger ones have their own, in multiples of 2 MiB
_FLOAT32 = 4
UNUSED_SHARE: Mapping[Level, float] = {"none": 0.003, "selective": 0.0353, "full": 0.0}  # of what is freed again
UNUSED_SHARE_OF_EXPERTS: Mapping[Level, float] = {"none": 0.0125, "selective": 0.025, "full": 0.102}  # with experts
REMAINDER_SHARE = 0.77  # "full": of what remains of blocks besides all that is saved
SELECTIVE_REMAINDER_SHARE = 0.371  # "selective": of what remains of blocks of width A besides the inputs of layers
ABSENT_SHARE = 0.114  # of three gradients of [T, I] and of [T, D]


class ShardedWeight(NamedTuple):
    """A weight on one rank, in elements."""

    shard: int  # the most that a rank has; FSDP pads the others to it
    num_shards: int = 1  # ranks over which it is sharded
    is_trained: bool = True


@dataclass(frozen=True, slots=True)
class Unit:
    """The weights that FSDP gathers together: a layer's, or the root's, those outside of all layers."""

    weights: tuple[ShardedWeight, ...] = ()

    @property
    def gathered(self) -> int:
        """Elements of whole weights."""
        return sum(weight.shard * weight.num_shards for weight in self.weights)

    @property
    def shard(self) -> int:
        """Elements on one rank of what is sharded over several."""
        return sum(weight.shard for weight in self.weights if weight.num_shards > 1)

    @property
    def gradient(self) -> int:
        """Elements of gradients, whole."""
        return sum(weight.shard * weight.num_shards for weight in self.weights if weight.is_trained)

    @property
    def gradient_shard(self) -> int:
        """Elements of gradients on one rank."""
        return sum(weight.shard for weight in self.weights if weight.is_trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes of the tensors of a layer in the compute dtype, for a micro-batch of T tokens."""

    hidden: int  # [T, D]
    queries: int  # [T, A]
    mlp: int  # [T, I]
    saved: int  # of all layers together, from forward to backward
    has_experts: bool

    @property
    def remainder(self) -> float:
        """The share of a wide block that remains besides hidden states, of the width that they fill better."""
        return min(width % self.hidden / width for width in (self.queries, self.mlp))


class Blocks:
    """The segments of one stream: a request gets the smallest free block that it fits into, or a new segment."""

    def __init__(self) -> None:
        self.reserved = 0  # bytes
        self._free: tuple[list[tuple[int, int]], ...] = ([], [])  # of small and of other segments: size, start
        self._sizes: dict[int, int] = {}  # of the blocks in use, by their starts
        self._end = 0  # of the last segment; one byte lies between two, so that their blocks are no neighbours

    def take(self, num_bytes: int) -> int:
        """Cut a block for a tensor, and return its start."""
        size = max(1, -(-num_bytes // _SMALLEST)) * _SMALLEST
        is_large = size > _SMALL
        free = self._free[is_large]
        place = bisect.bisect_left(free, (size, 0))
        if place == len(free):
            segment = 2 * _MIB if not is_large else 20 * _MIB if size < _MEDIUM else -(-size // (2 * _MIB)) * 2 * _MIB
            found, start = segment, self._end
            self._end += segment + 1
            self.reserved += segment
        else:
            found, start = free.pop(place)
        rest = found - size
        if rest > _SMALL or (rest and not is_large):
            bisect.insort(free, (rest, start + size))
            found = size
        self._sizes[start] = found
        return start

    def give(self, start: int) -> None:
        """Free a block; free neighbours become one."""
        size = self._sizes.pop(start)
        free = self._free[size > _SMALL]
        for other in [one for one in free if one[1] + one[0] == start or one[1] == start + size]:
            free.remove(other)
            start, size = min(start, other[1]), size + other[0]
        bisect.insort(free, (size, start))


def reserved(
    *,
    units: Sequence[Unit],
    persistent: Iterable[int],
    moving: int,
    activations: Activations,
    level: Level,
    weight_bytes: int,
    compute_bytes: int,
    ahead: int = 1,
    copies: int = 1,
    on_host: bool = False,
) -> int:
    """Return the bytes of all segments of a rank that trains.

    `units` are the root and the layers in order, `persistent` the bytes of each tensor on the stream that computes that
    stays from step to step, `moving` those of all that is allocated and freed there, at the fullest moment,
    `activations` among them. Elements of shards and of gathered weights have `weight_bytes` and `compute_bytes`.
    `ahead` units are gathered before they compute. Gradients are summed over `copies` of the model. Weights and
    gradients may stay `on_host`.
    """
    blocks = Blocks()
    for size in persistent:
        blocks.take(size)
    root, *layers = units
    largest = max((layer.gradient for layer in layers), default=0)
    root_sum = root.gradient * _FLOAT32 if root.gradient > largest else 0
    embedding = max((w.shard * w.num_shards for w in root.weights if w.is_trained), default=0) * compute_bytes
    if embedding < max(activations.queries, activations.mlp):
        embedding = 0
    if level == "none" and all(weight.num_shards == 1 for unit in units for weight in unit.weights):
        root_sum *= 2
    unused = (UNUSED_SHARE_OF_EXPERTS if activations.has_experts else UNUSED_SHARE)[level] * moving
    if not activations.has_experts:
        unused -= ABSENT_SHARE * 3 * (activations.mlp + activations.hidden)
    if level == "full":
        unused += REMAINDER_SHARE * activations.remainder * activations.saved
    if level == "selective":
        beside_queries = activations.queries % activations.hidden / activations.queries
        unused += SELECTIVE_REMAINDER_SHARE * beside_queries * activations.hidden * len(layers)
    others = gathering(units, weight_bytes=weight_bytes, compute_bytes=compute_bytes, ahead=ahead, on_host=on_host)
    others += reducing(units, copies=copies, on_host=on_host)
    return blocks.reserved + moving + root_sum + embedding + int(unused) + others


def gathering(
    units: Sequence[Unit], *, weight_bytes: int, compute_bytes: int, ahead: int = 1, on_host: bool = False
) -> int:
    """Return the bytes of the stream that gathers: a unit's shard in the compute dtype, and then all of the unit.

    What is gathered is copied to the stream that computes, and freed when the next unit has been. Shards on the host
    come weight by weight, in their own dtype. One rank gathers nothing.
    """
    blocks, pending, casts = Blocks(), list[int](), weight_bytes != compute_bytes
    for unit in units:
        if not unit.shard:
            continue
        shards = [blocks.take(unit.shard * compute_bytes)] if casts and not on_host else []
        for weight in unit.weights if on_host else ():
            shards.append(blocks.take(weight.shard * weight_bytes))
            if casts:
                cast = blocks.take(weight.shard * compute_bytes)
                blocks.give(shards.pop())
                shards.append(cast)
        pending.append(blocks.take(unit.gathered * compute_bytes))
        for shard in shards:
            blocks.give(shard)
        while len(pending) > ahead:
            blocks.give(pending.pop(0))
    return blocks.reserved


def reducing(units: Sequence[Unit], *, copies: int = 1, on_host: bool = False) -> int:
    """Return the bytes of the stream that reduces, over two micro-batches: the second adds to the first's gradients.

    Where gradients are summed over copies as well, the second's stay until the end of its backward pass.
    """
    blocks, backward = Blocks(), [unit.gradient_shard * _FLOAT32 for unit in (*units[:0:-1], units[0])]
    if not on_host:
        for size in filter(None, backward):
            blocks.take(size)
    waiting = list[int]()
    for size in filter(None, backward):
        waiting.append(blocks.take(size))
        if copies == 1:
            blocks.give(waiting.pop())
    return blocks.reserved


def persistent_tensors(units: Iterable[Unit], *, weight_bytes: int, states: int) -> list[int]:
    """List the bytes of each tensor of weights, and of float32 optimizer state, that stay on the device."""
    weights = list(chain.from_iterable(unit.weights for unit in units))
    state = [weight.shard * _FLOAT32 for weight in weights if weight.is_trained for _ in range(states)]
    return [*(weight.shard * weight_bytes for weight in weights), *state]
