"""The packing of a mini-batch: which sequences are computed together, on which place of the data mesh.

A unit is what stays in one micro-batch: a sequence, the two of a pair, or sequences that begin alike.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from spmdrl.algo.packing import balance, num_micro_batches, pack, sequence_costs
from spmdrl.algo.prefix_tree import BLOCK_TOKENS
from spmdrl.config.plan import Plan
from spmdrl.dist.exchange import SequenceInfo

# Units of sequences that begin alike have at most one of these numbers of quarters of a place's share: the smaller they
# are, the better the balance, and the more tokens are computed twice.
_QUARTERS = (5, 4, 3, 2, 1)
# Sequences are packed as if none began alike unless this part of the time is saved: calls for nodes take time as well.
_MIN_SAVED = 0.1


@dataclass(frozen=True, slots=True)
class PackingUnit:
    """Sequences that stay together, with their number of tokens and cost, of those that are shared once."""

    infos: tuple[SequenceInfo, ...]
    num_tokens: int
    cost: int


@dataclass(frozen=True, slots=True)
class Packed:
    """The units of each micro-batch of each place, as many micro-batches in every place; some may be empty."""

    bins: list[list[list[PackingUnit]]]
    shares_prefixes: bool = False

    @property
    def infos(self) -> list[list[SequenceInfo]]:
        """The sequences of each place."""
        return [[info for in_bin in bins for unit in in_bin for info in unit.infos] for bins in self.bins]

    @property
    def costs(self) -> list[list[int]]:
        """The cost of each micro-batch of each place."""
        return [[sum(unit.cost for unit in in_bin) for in_bin in bins] for bins in self.bins]

    @property
    def elapsed(self) -> int:
        """The time that it takes, in units of cost: places wait for each other after every micro-batch."""
        return sum(map(max, zip(*self.costs, strict=True)))


def pack_over_places(infos: list[SequenceInfo], plan: Plan, *, num_places: int, multiple: int) -> Packed:
    """Divide a mini-batch, in the step's global order, into shares of about the same cost and these into micro-batches.

    Padded micro-batches have a multiple of `multiple` tokens. Where the plan shares prefixes, the best of several ways
    to do so is taken, if it is worth it.
    """
    together = [*zip(*[iter(infos)] * plan.sequences_together, strict=True)]
    plain = Packed(_bins([_unit(some, plan, shares_prefixes=False) for some in together], plan, num_places, multiple))
    if not plan.shares_prefixes or not infos:
        return plain
    units = [_unit(some, plan, shares_prefixes=True) for some in together]
    budget = plan.max_tokens_per_micro_batch
    assert budget is not None, "a rule of [pack] asks for it"
    longest = max(unit.num_tokens for unit in units)
    share = math.ceil(sum(unit.num_tokens for unit in _joined(units, plan, most=budget)) / num_places)
    mosts = {min(budget - budget % multiple, max(longest, share * quarters // 4)) for quarters in _QUARTERS}
    sharing = [
        Packed(_bins(_joined(units, plan, most=most), plan, num_places, multiple), True) for most in sorted(mosts)
    ]
    best = min(sharing, key=lambda packed: packed.elapsed)
    return best if best.elapsed <= (1 - _MIN_SAVED) * plain.elapsed else plain


def _unit(infos: tuple[SequenceInfo, ...], plan: Plan, *, shares_prefixes: bool) -> PackingUnit:
    """Make a unit of sequences that stay together in any case."""
    unit, *others = [PackingUnit((info,), info.num_tokens, _cost(info.num_tokens, plan)) for info in infos]
    for other in others:
        unit = _union(unit, other, _shared_tokens(unit, other) if shares_prefixes else 0, plan)
    return unit


def _union(one: PackingUnit, other: PackingUnit, shared: int, plan: Plan) -> PackingUnit:
    """Join two units; the last sequence of one and the first of the other have `shared` tokens in common."""
    cost = one.cost + other.cost - _cost(shared, plan)
    return PackingUnit(one.infos + other.infos, one.num_tokens + other.num_tokens - shared, cost)


def _cost(num_tokens: int, plan: Plan) -> int:
    (cost,) = sequence_costs([num_tokens], linear=plan.cost_per_token, quadratic=plan.cost_per_squared_token)
    return cost


def _shared_tokens(one: PackingUnit, other: PackingUnit) -> int:
    """Count the tokens that the last sequence of one unit and the first of another begin with alike."""
    hashes = zip(one.infos[-1].block_hashes, other.infos[0].block_hashes, strict=False)
    return BLOCK_TOKENS * sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], hashes))


def _joined(units: list[PackingUnit], plan: Plan, *, most: int) -> list[PackingUnit]:
    """Join units that begin alike, up to `most` tokens each, first those that have most in common.

    A unit's tokens and cost are not less than those of its tree: the tokens that each sequence has in common with the
    one before it, in the order of prefixes, are counted once, and so is their attention.
    """
    in_order = sorted(units, key=lambda unit: (unit.infos[0].block_hashes, unit.infos[0].place))
    shared = [0, *itertools.starmap(_shared_tokens, itertools.pairwise(in_order))]
    runs = dict(enumerate(in_order))  # by the place of their first
    first_of = [*range(len(in_order))]  # of the last of each run, the place of its first
    last_of = [*range(len(in_order))]
    for place in sorted(range(len(in_order)), key=lambda place: -shared[place]):
        if not shared[place]:
            break
        first, last = first_of[place - 1], last_of[place]
        union = _union(runs[first], runs[place], shared[place], plan)
        if union.num_tokens <= most:
            runs[first] = union
            del runs[place]
            first_of[last], last_of[first] = first, last
    return sorted(runs.values(), key=lambda unit: unit.infos[0].place)


def _bins(units: list[PackingUnit], plan: Plan, num_places: int, multiple: int) -> list[list[list[PackingUnit]]]:
    """Divide units into shares, and each share into micro-batches.

    Every share gets the same number, because all ranks must run the same number of forwards: that of the share that
    needs most. Some may be empty.
    """
    in_each = plan.sequences_per_micro_batch
    limits: dict[str, int | None] = {
        "max_tokens": plan.max_tokens_per_micro_batch,
        "sequences_per_micro_batch": None if in_each is None else in_each // plan.sequences_together,
    }
    shares = [[units[i] for i in share] for share in balance([unit.cost for unit in units], num_places)]
    lengths = [[unit.num_tokens for unit in share] for share in shares]
    number = max(num_micro_batches(of_share, **limits, multiple=multiple) for of_share in lengths)
    packed = [
        pack(of_share, **limits, min_bins=number, multiple=multiple, costs=[unit.cost for unit in share])
        for share, of_share in zip(shares, lengths, strict=True)
    ]
    return [[[share[i] for i in indices] for indices in bins] for share, bins in zip(shares, packed, strict=True)]
