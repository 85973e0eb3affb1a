"""Every sequence is packed once, never over the cap, into about as few micro-batches as can be."""

from __future__ import annotations

import math
import random

import pytest

from spmdrl.algo.packing import balance, first_fit_bins, karmarkar_karp, pack
from tests import oracle


def some_lengths(seed: int) -> tuple[list[int], int]:
    """(lengths, cap): uniform, long-tailed, nearly full or all equal, by turns."""
    draw = random.Random(seed)
    count, cap = draw.randint(1, 60), draw.randint(40, 400)
    match seed % 4:
        case 0:
            lengths = [draw.randint(1, cap) for _ in range(count)]
        case 1:
            lengths = [min(cap, 1 + int(draw.expovariate(8 / cap))) for _ in range(count)]
        case 2:
            lengths = [draw.choice([cap // 2, cap // 3, cap // 4, cap - cap // 3]) for _ in range(count)]
        case _:
            lengths = [draw.randint(1, cap)] * count
    return lengths, cap


def flat(bins: list[list[int]]) -> list[int]:
    return sorted(index for indices in bins for index in indices)


def tokens_of(bins: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in indices) for indices in bins]


def under_cap(lengths: list[int], cap: int, min_bins: int = 1) -> list[list[int]]:
    return pack(lengths, max_tokens=cap, sequences_per_micro_batch=None, min_bins=min_bins)


def test_pack_takes_each_sequence_once_and_respects_the_cap() -> None:
    for seed in range(300):
        lengths, cap = some_lengths(seed)
        bins = under_cap(lengths, cap)
        assert flat(bins) == list(range(len(lengths)))
        assert max(tokens_of(bins, lengths)) <= cap
        assert all(bins)
        assert len(bins) == first_fit_bins(lengths, cap)
        # First-fit leaves at most one bin half empty.
        assert math.ceil(sum(lengths) / cap) <= len(bins) <= 2 * sum(lengths) / cap + 1


def test_ranks_can_agree_on_a_number_of_micro_batches() -> None:
    """Asking for more than needed gives exactly that many, still under the cap: or ranks would wait forever."""
    for seed in range(300):
        lengths, cap = some_lengths(seed)
        needed = len(under_cap(lengths, cap))
        for min_bins in (needed - 1, needed, needed + 1, needed + 3, len(lengths) + 5):
            bins = under_cap(lengths, cap, min_bins)
            assert len(bins) == max(needed, min_bins)
            assert flat(bins) == list(range(len(lengths)))
            assert max(tokens_of(bins, lengths)) <= cap


def test_differencing_alone_would_break_the_cap() -> None:
    lengths, cap = [8, 7, 6, 5, 4], 15
    assert max(tokens_of(karmarkar_karp(lengths, 2), lengths)) > cap
    assert tokens_of(under_cap(lengths, cap), lengths) == [15, 15]


def test_micro_batches_are_balanced_when_the_cap_allows_it() -> None:
    """First-fit alone would leave 100 tokens, 100 tokens and 10 tokens."""
    assert tokens_of(under_cap([10] * 21, 100), [10] * 21) == [70, 70, 70]
    assert tokens_of(under_cap([10] * 21, 100, 7), [10] * 21) == [30] * 7


def test_short_sequences_need_no_more_than_one_micro_batch_above_the_lower_bound() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 100) for _ in range(draw.randint(1, 200))]
        assert len(under_cap(lengths, 1000)) <= math.ceil(sum(lengths) / 1000) + 1


def test_first_fit_takes_the_longest_first() -> None:
    assert first_fit_bins([4, 4, 4, 6, 6, 6], 10) == 3  # in this order 4 and 4 would share a bin, and need a fourth


def test_first_fit_is_close_to_the_best_count() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 20) for _ in range(7)]
        best = oracle.fewest_bins(lengths, 20)
        assert best <= first_fit_bins(lengths, 20) <= 11 / 9 * best + 6 / 9


def test_equal_lengths_are_contiguous() -> None:
    lengths = [5, 3, 5, 3, 5, 3, 9, 5]
    for bins in (under_cap(lengths, 20), pack(lengths, max_tokens=None, sequences_per_micro_batch=5)):
        for indices in bins:
            assert indices == sorted(indices, key=lambda i: (lengths[i], i))


def test_largest_micro_batch_comes_first() -> None:
    for seed in range(20):
        lengths, cap = some_lengths(seed)
        tokens = tokens_of(under_cap(lengths, cap, 5), lengths)
        assert tokens == sorted(tokens, reverse=True)


def test_static_mode_counts_sequences() -> None:
    lengths = [9, 1, 1, 7, 3, 3, 2]
    bins = pack(lengths, max_tokens=None, sequences_per_micro_batch=3)
    assert bins == [[4, 5, 3], [1, 2, 0], [6]]
    padded = pack(lengths, max_tokens=None, sequences_per_micro_batch=3, min_bins=5)
    assert padded == [*bins, [], []]


def test_no_sequences_make_empty_micro_batches() -> None:
    assert under_cap([], 10) == [[]]
    assert pack([], max_tokens=None, sequences_per_micro_batch=2, min_bins=3) == [[], [], []]


def test_a_sequence_over_the_cap_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"41 tokens but pack\.max_tokens_per_micro_batch = 40"):
        under_cap([3, 41, 5], 40)
    assert under_cap([3, 40, 5], 40) == [[1], [0, 2]]


@pytest.mark.parametrize("both", [None, 5])
def test_one_mode_and_not_two(both: int | None) -> None:
    with pytest.raises(ValueError, match="set one of"):
        pack([1, 2], max_tokens=both, sequences_per_micro_batch=both)


@pytest.mark.parametrize("num_bins", [1, 2, 3, 8, 40])
def test_differencing_takes_each_index_once_and_in_order(num_bins: int) -> None:
    for seed in range(60):
        costs, _ = some_lengths(seed)
        bins = karmarkar_karp(costs, num_bins)
        assert len(bins) == num_bins
        assert flat(bins) == list(range(len(costs)))
        filled = [indices for indices in bins if indices]
        assert bins[: len(filled)] == filled == sorted(sorted(indices) for indices in filled)
        assert bins == karmarkar_karp(tuple(costs), num_bins)


def test_differencing_worked_example() -> None:
    # The textbook's: 8 and 7 differ by 1, 6 and 5 by 1, then 4 - 1 = 3, and 3 - 1 = 2.
    assert sorted(tokens_of(karmarkar_karp([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4])) == [14, 16]


@pytest.mark.parametrize("num_bins", [2, 3])
def test_differencing_is_close_to_the_best(num_bins: int) -> None:
    draw = random.Random(num_bins)
    excess = []
    for _ in range(25):
        costs = [draw.randint(1, 100) for _ in range(7)]
        best = oracle.best_largest_bin(costs, num_bins)
        excess.append(max(tokens_of(karmarkar_karp(costs, num_bins), costs)) / best - 1)
    assert min(excess) >= 0
    assert max(excess) <= 1 / 3
    assert sum(excess) / len(excess) < 0.04


@pytest.mark.parametrize("num_bins", [2, 4, 8])
def test_differencing_is_no_worse_than_cutting_in_order(num_bins: int) -> None:
    for seed in range(30):
        draw = random.Random(seed)
        costs = [1 + int(draw.expovariate(1 / 500)) for _ in range(64)]
        lowest = max(*costs, math.ceil(sum(costs) / num_bins))
        ours = max(tokens_of(karmarkar_karp(costs, num_bins), costs))
        assert lowest <= ours <= oracle.largest_contiguous_bin(costs, num_bins)
        assert ours <= 1.01 * lowest


def test_balance_evens_out_tokens() -> None:
    draw = random.Random(0)
    lengths = [1 + int(draw.expovariate(1 / 800)) for _ in range(256)]
    tokens = tokens_of(balance(lengths, 8), lengths)
    assert max(tokens) - min(tokens) <= 2


@pytest.mark.parametrize("length", [0, 1, 17])
def test_balance_evens_out_numbers_where_lengths_are_equal(length: int) -> None:
    assert sorted(map(len, balance([length] * 22, 4))) == [5, 5, 6, 6]


def test_fewer_sequences_than_ranks() -> None:
    assert balance([4, 9], 4) == [[0], [1], [], []]
