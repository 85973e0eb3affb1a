"""Which sequences go together: over ranks by balance, into micro-batches under a token budget.

Everything here is a pure function of lengths, so every rank that knows all lengths computes the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Bin = tuple[int, tuple[int, ...]]  # cost, indices


def karmarkar_karp(costs: Sequence[int], num_bins: int) -> list[list[int]]:
    """Split indices into num_bins lists of nearly equal cost by the largest differencing method.

    Karmarkar and Karp 1982; its form for many bins: Korf 2009, "Multi-way number partitioning". Every index is in
    exactly one list; lists ascend, and so do their first indices, empty lists last.
    """
    # A solution is its non-empty bins, largest first. At each turn the two with the greatest spread are joined, the
    # large bins of one with the small (or still empty) bins of the other.
    heap: list[tuple[int, int, list[Bin]]] = [(-cost, index, [(cost, (index,))]) for index, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, index, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = _join(one, other, num_bins)
        smallest = joined[-1][0] if len(joined) == num_bins else 0
        heapq.heappush(heap, (smallest - joined[0][0], index, joined))
    bins = sorted(sorted(indices) for _, indices in heap[0][2]) if heap else []
    return bins + [[] for _ in range(num_bins - len(bins))]


def _join(one: list[Bin], other: list[Bin], num_bins: int) -> list[Bin]:
    """Two solutions as one, largest bin first; the i-th largest of one meets the i-th smallest of the other."""
    overlap = max(0, len(one) + len(other) - num_bins)
    met = [
        (a[0] + b[0], a[1] + b[1])
        for a, b in zip(one[len(one) - overlap :], reversed(other[len(other) - overlap :]), strict=True)
    ]
    alone = one[: len(one) - overlap] + other[: len(other) - overlap]
    return sorted(met + alone, key=lambda bin_: -bin_[0])


def balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Split sequences of these lengths, in tokens, over ranks: the indices of each rank's share."""
    return karmarkar_karp(lengths, num_ranks)


def first_fit_bins(lengths: Sequence[int], max_tokens: int) -> int:
    """How many bins of max_tokens first-fit decreasing needs."""
    return len(_first_fit_decreasing(lengths, max_tokens))


def pack(
    lengths: Sequence[int],
    *,
    max_tokens: int | None,
    sequences_per_micro_batch: int | None,
    min_bins: int = 1,
) -> list[list[int]]:
    """Split sequences of these lengths, in tokens, into micro-batches: the indices in each of them.

    Set exactly one of max_tokens, a cap that no micro-batch exceeds, and sequences_per_micro_batch, which takes the
    sequences in their order. The number of micro-batches is exactly max(min_bins, the number without min_bins), so
    that ranks can agree on one; where there is nothing to put in, a micro-batch is empty.

    Within a micro-batch indices are ordered by (length, index): equal lengths are contiguous. The micro-batch with the
    most tokens comes first: too little memory shows at once, and ranks meet with micro-batches of similar size.
    """
    if max_tokens is not None and sequences_per_micro_batch is None:
        bins = _pack_under_cap(lengths, max_tokens, min_bins)
    elif sequences_per_micro_batch is not None and max_tokens is None:
        indices = list(range(len(lengths)))
        bins = [indices[i : i + sequences_per_micro_batch] for i in range(0, len(lengths), sequences_per_micro_batch)]
    else:
        raise ValueError("set one of pack.max_tokens_per_micro_batch and pack.sequences_per_micro_batch")
    bins += [[] for _ in range(min_bins - len(bins))]
    micro_batches = [sorted(bin_, key=lambda i: (lengths[i], i)) for bin_ in bins]
    return sorted(micro_batches, key=lambda micro_batch: (-sum(lengths[i] for i in micro_batch), micro_batch))


def _pack_under_cap(lengths: Sequence[int], max_tokens: int, min_bins: int) -> list[list[int]]:
    """Balanced micro-batches if they respect the cap; else those of first-fit decreasing, which always do."""
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ValueError(
            f"a sequence has {longest} tokens but pack.max_tokens_per_micro_batch = {max_tokens}; "
            f"set it to {longest} or more, or allow only shorter prompts and responses"
        )
    fitted = _first_fit_decreasing(lengths, max_tokens)
    balanced = karmarkar_karp(lengths, max(len(fitted), min_bins))
    if all(sum(lengths[i] for i in indices) <= max_tokens for indices in balanced):
        return balanced
    # Not more bins than first-fit needs: all ranks run as many micro-batches as the one with the most, and count on
    # `pack` to give exactly the number that was asked for.
    return fitted


def _first_fit_decreasing(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first, each into the first bin with room: at most 11/9 of the best number of bins, plus 1."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((place for place, left in enumerate(room) if lengths[index] <= left), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins
