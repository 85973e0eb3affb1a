"""Which sequences go together: over ranks by balance, into micro-batches under a token budget.

Everything here is a pure function of lengths, so every rank that knows all lengths computes the same answer. Costs are
integers for the same reason: their sums are exact in whatever order they are taken.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from spmdrl.conversation import UserError

# (minus its cost, minus its number of sequences, the index of one of them). With minus signs a sorted list has its
# cheapest bin last, where a list is changed at no expense; of equal costs that is the one with the fewest sequences.
Bin = tuple[int, int, int]
CostedItem = tuple[int, int]  # (cost, index)

# Bounds on the local search: it stops by itself much earlier, unless no solution is within its reach.
_PARTNERS = 8  # of the costliest bin, the cheapest first
_SWAPS_PER_BIN = 2
# Bins that are closer to their mean than one part in this are even enough.
_EVEN_ENOUGH = 100_000


def flop_coefficients(*, matmul_parameters: int, num_layers: int, num_heads: int, head_dim: int) -> tuple[int, int]:
    """(linear, quadratic): the forward pass over a sequence of T tokens takes linear T + quadratic T^2 FLOPs.

    Every token is multiplied with `matmul_parameters`: those outside the embedding table, in a mixture of experts the
    ones of the chosen experts only; the output head counts, also where it is the embedding table. That is 2 FLOPs a
    parameter. In each layer every head takes 2 head_dim FLOPs for the score of a pair of tokens and as many to add up
    its values; causal attention has T (T + 1) / 2 pairs:

        2 matmul_parameters T  +  4 num_layers num_heads head_dim T (T + 1) / 2

    The backward pass takes twice that and recomputation once more, of both parts alike: the balance is the same.
    """
    quadratic = 2 * num_layers * num_heads * head_dim
    return 2 * matmul_parameters + quadratic, quadratic


def sequence_costs(lengths: Sequence[int], *, linear: int, quadratic: int) -> list[int]:
    """Costs of sequences of these lengths in tokens: linear T + quadratic T^2, in the coefficients' unit."""
    return [(linear + quadratic * length) * length for length in lengths]


def padding_tokens(num_tokens: int, multiple: int) -> int:
    """How many tokens, 0 to multiple - 1, a micro-batch of num_tokens lacks until `multiple` divides it."""
    return -num_tokens % multiple


def karmarkar_karp(costs: Sequence[int], num_bins: int) -> list[list[int]]:
    """Split indices into num_bins lists of nearly equal cost by the largest differencing method.

    Karmarkar and Karp 1982; its form for many bins: Korf 2009, "Multi-way number partitioning". Every index is in
    exactly one list; lists ascend, and so do their first indices, empty lists last.
    """
    # A solution is its bins that are not empty, the costliest first; at first every sequence is one. At each turn the
    # two with the greatest spread are joined. All but few of the turns add a lone sequence to a solution, and those
    # take no longer than to find its place; sequences wait, sorted, outside of the heap.
    waiting = sorted(range(len(costs)), key=lambda i: (costs[i], -i))
    heap: list[tuple[int, int, list[Bin]]] = []  # (minus its spread, the turn that made it, solution)
    following = list(range(len(costs)))  # the next in the same bin, and after the last its first

    def greatest_spread() -> list[Bin]:
        if heap and not (waiting and costs[waiting[-1]] > -heap[0][0]):
            return heapq.heappop(heap)[2]
        index = waiting.pop()
        return [(-costs[index], -1, index)]

    for turn in range(len(costs) - 1):
        joined = _join(greatest_spread(), greatest_spread(), num_bins, following)
        cheapest = joined[-1][0] if len(joined) == num_bins else 0
        heapq.heappush(heap, (joined[0][0] - cheapest, turn, joined))
    bins = greatest_spread() if costs else []
    return _in_order([_ring(index, following) for *_, index in bins], num_bins)


def _join(one: list[Bin], other: list[Bin], num_bins: int, following: list[int]) -> list[Bin]:
    """Two solutions as one, made of the larger; costly bins of one meet cheap, or still empty, bins of the other."""
    large, small = (one, other) if len(one) >= len(other) else (other, one)
    num_alone = num_bins - len(large)  # the bins of `small` that meet an empty one
    changed, meeting = small[:num_alone], small[num_alone:]
    if meeting:
        cheap = large[-len(meeting) :]
        del large[-len(meeting) :]
        changed += [_unite(*pair, following) for pair in zip(cheap, reversed(meeting), strict=True)]
    if len(changed) == 1:
        insort(large, changed[0])
    else:
        large += changed
        large.sort()
    return large


def _unite(one: Bin, other: Bin, following: list[int]) -> Bin:
    """One bin with the sequences of both: two rings whose next steps are swapped become one ring."""
    following[one[2]], following[other[2]] = following[other[2]], following[one[2]]
    return one[0] + other[0], one[1] + other[1], one[2]


def _ring(start: int, following: list[int]) -> list[int]:
    """The indices that are reached from `start`, itself included."""
    ring, index = [start], following[start]
    while index != start:
        ring.append(index)
        index = following[index]
    return ring


def _in_order(bins: list[list[int]], num_bins: int) -> list[list[int]]:
    """Sort each bin, and bins by their first indices; add empty ones up to `num_bins`."""
    filled = sorted(sorted(indices) for indices in bins if indices)
    return filled + [[] for _ in range(num_bins - len(filled))]


def balance(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Split sequences of these costs, such as their lengths in tokens, over ranks: the indices of each rank's share.

    By differencing, and then by swaps that make the costliest share cheaper. Lists ascend, and so do their first
    indices, empty lists last.
    """
    mean = -(-sum(costs) // num_ranks)
    return _even_out(karmarkar_karp(costs, num_ranks), costs, enough=mean + mean // _EVEN_ENOUGH)


def _even_out(bins: list[list[int]], costs: Sequence[int], *, enough: int) -> list[list[int]]:
    """Lower the cost of the costliest bin to `enough`, or as far as it gets by swaps with one of the cheapest bins.

    No bin ends up costlier than the costliest was. Lists ascend, and so do their first indices, empty lists last.
    """
    ranking = sorted((sum(costs[i] for i in indices), place) for place, indices in enumerate(bins))
    if ranking[-1][0] <= enough:
        return bins
    contents = [sorted((costs[i], i) for i in indices) for indices in bins]
    for _ in range(_SWAPS_PER_BIN * len(bins)):
        most, giver = ranking.pop()
        if most <= enough:
            break
        for partner in ranking[:_PARTNERS]:
            least, taker = partner
            if swap := _best_swap(contents[giver], contents[taker], gap=most - least, excess=most - enough):
                break
        else:
            break
        given, returned = swap
        _hand_over(given, contents[giver], contents[taker])
        _hand_over(returned, contents[taker], contents[giver])
        moved = sum(cost for cost, _ in given) - sum(cost for cost, _ in returned)
        ranking.remove(partner)
        insort(ranking, (most - moved, giver))
        insort(ranking, (least + moved, taker))
    return _in_order([[index for _, index in content] for content in contents], len(bins))


def _best_swap(
    giving: list[CostedItem], taking: list[CostedItem], *, gap: int, excess: int
) -> tuple[list[CostedItem], list[CostedItem]] | None:
    """Find the swap for a bin that costs `gap` more than another: one sequence that it gives, at most one that it gets.

    Worth as nearly as can be the excess, so that no more is changed than has to be, or half the gap if that is less.
    None where no swap makes the costlier of the two cheaper. Contents ascend.
    """
    wanted = min(excess, gap // 2)
    closest, swap = gap, None
    for given in giving:
        # The sequence just below what is wanted, or the one after; nothing where none is below.
        place = bisect_left(taking, (given[0] - wanted,))
        for returned in ([] if place == 0 else [taking[place - 1]], taking[place : place + 1]):
            moved = given[0] - sum(cost for cost, _ in returned)
            if 0 < moved < gap and abs(moved - wanted) < closest:
                closest, swap = abs(moved - wanted), ([given], returned)
    return swap


def _hand_over(items: list[CostedItem], source: list[CostedItem], target: list[CostedItem]) -> None:
    """Move what is in one bin to another; both stay in order."""
    for item in items:
        source.remove(item)
        insort(target, item)


def num_micro_batches(
    lengths: Sequence[int], *, max_tokens: int | None, sequences_per_micro_batch: int | None, multiple: int = 1
) -> int:
    """How many micro-batches `pack` makes when it is not asked for more; ranks agree on the greatest of theirs."""
    return max(1, len(_fill(lengths, max_tokens, sequences_per_micro_batch, multiple)))


def pack(
    lengths: Sequence[int],
    *,
    max_tokens: int | None,
    sequences_per_micro_batch: int | None,
    min_bins: int = 1,
    multiple: int = 1,
    costs: Sequence[int] | None = None,
) -> list[list[int]]:
    """Split sequences of these lengths, in tokens, into micro-batches: the indices in each of them.

    Set exactly one of max_tokens, a cap that no micro-batch exceeds, also when it is padded until `multiple` divides
    its tokens, and sequences_per_micro_batch, which takes the sequences in their order. The number of micro-batches is
    exactly max(min_bins, num_micro_batches(...)), so that ranks can agree on one; where there is nothing to put in, a
    micro-batch is empty. Under a cap their costs are evened out; without `costs`, a sequence costs its length.

    Within a micro-batch indices are ordered by (length, index): equal lengths are contiguous. The costliest micro-batch
    comes first: too little memory shows at once, and ranks meet with micro-batches of similar cost.
    """
    costs = lengths if costs is None else costs
    bins = _fill(lengths, max_tokens, sequences_per_micro_batch, multiple)
    bins += [[] for _ in range(max(1, min_bins) - len(bins))]
    if max_tokens is not None:
        bins = _balanced(bins, lengths, costs, _usable_tokens(lengths, max_tokens, multiple))
    micro_batches = [sorted(indices, key=lambda i: (lengths[i], i)) for indices in bins]
    return sorted(micro_batches, key=lambda micro_batch: (-sum(costs[i] for i in micro_batch), micro_batch))


def _fill(
    lengths: Sequence[int], max_tokens: int | None, sequences_per_micro_batch: int | None, multiple: int
) -> list[list[int]]:
    """Micro-batches as full as they get: their number counts, not yet their balance."""
    if max_tokens is not None and sequences_per_micro_batch is None:
        return _first_fit_decreasing(lengths, _usable_tokens(lengths, max_tokens, multiple))
    if sequences_per_micro_batch is not None and max_tokens is None:
        starts = range(0, len(lengths), sequences_per_micro_batch)
        return [list(range(start, min(start + sequences_per_micro_batch, len(lengths)))) for start in starts]
    raise UserError("set one of pack.max_tokens_per_micro_batch and pack.sequences_per_micro_batch")


def _usable_tokens(lengths: Sequence[int], max_tokens: int, multiple: int) -> int:
    """Return the most tokens that a micro-batch can have and, after padding, not exceed max_tokens."""
    if max_tokens < multiple:
        raise UserError(
            f"micro-batches are padded to a multiple of {multiple} tokens but pack.max_tokens_per_micro_batch = "
            f"{max_tokens}; set it to {multiple} or more"
        )
    usable, longest = max_tokens - max_tokens % multiple, max(lengths, default=0)
    if longest > usable:
        of_which = f", of which {usable} can be used" if usable < max_tokens else ""
        enough = longest + padding_tokens(longest, multiple)
        raise UserError(
            f"a sequence has {longest} tokens but pack.max_tokens_per_micro_batch = {max_tokens}{of_which}; "
            f"set it to {enough} or more, or allow only shorter prompts and responses"
        )
    return usable


def _balanced(
    fitted: list[list[int]], lengths: Sequence[int], costs: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Even out the costs of as many bins as `fitted` has; where that breaks max_tokens, return `fitted`."""
    # What is cut by cost can have too many tokens here and there. Swaps of tokens mend that, at little loss of balance.
    balanced = _even_out(balance(costs, len(fitted)), lengths, enough=max_tokens)
    if all(sum(lengths[i] for i in indices) <= max_tokens for indices in balanced):
        return balanced
    # Not more bins than first-fit needs: all ranks run as many micro-batches as the one with the most, and count on
    # `pack` to give exactly the number that was asked for.
    return fitted


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first, each into the first bin with room: at most 11/9 of the best number of bins, plus 6/9."""
    # A tree over more bins than are needed (at most one is left half empty): leaf `num_leaves + b` is the room in bin
    # b, and a node the greatest room below it, so that the first bin with enough is found by going down once.
    num_leaves = 1 << (2 * sum(lengths) // max_tokens).bit_length()
    room = [max_tokens] * (2 * num_leaves)
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length, node = lengths[index], 1
        while node < num_leaves:
            node *= 2
            node += room[node] < length
        if node - num_leaves == len(bins):
            bins.append([])
        bins[node - num_leaves].append(index)
        room[node] -= length
        while node > 1 and room[node // 2] != (most := max(room[node], room[node ^ 1])):
            node //= 2
            room[node] = most
    return bins


def fill_fraction(micro_batch_tokens: Sequence[int], max_tokens: int) -> float:
    """The share of the token budget that micro-batches with these numbers of tokens use, 0 to 1."""
    return sum(micro_batch_tokens) / (len(micro_batch_tokens) * max_tokens)


def imbalance(rank_costs: Sequence[int]) -> float:
    """Ratio of the costliest rank's cost to the mean over ranks: 1 at best, and where there is nothing to do."""
    total = sum(rank_costs)
    return max(rank_costs) * len(rank_costs) / total if total else 1.0


def idle_fraction(costs: Sequence[Sequence[int]]) -> float:
    """The share of all ranks' time lost to waiting, 0 to 1: [rank][micro-batch], as many of them on every rank.

    For time proportional to cost, and ranks that wait for each other after every micro-batch.
    """
    elapsed = sum(max(meeting) for meeting in zip(*costs, strict=True))
    return 1 - sum(map(sum, costs)) / (len(costs) * elapsed) if elapsed else 0.0


def neighbours_within(sizes: Sequence[int], limit: int) -> Iterator[slice]:
    """Split sizes, in order, into runs that add up to at most `limit`; a larger one is a run of its own."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
