"""Every sequence is packed once, never over the cap, into about as few micro-batches as can be."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.algo.packing import (
    balance,
    fill_fraction,
    flop_coefficients,
    idle_fraction,
    imbalance,
    karmarkar_karp,
    neighbours_within,
    num_micro_batches,
    pack,
    padding_tokens,
    sequence_costs,
)
from spmdrl.types import UserError
from tests.helpers import oracle

# The same examples in every run: what passes on one machine passes on all.
checked = settings(derandomize=True, deadline=None, max_examples=60)
some_costs = st.lists(st.integers(0, 60), max_size=24)
LLAMA_7B = {"matmul_parameters": 6_607_077_376, "num_layers": 32, "num_heads": 32, "head_dim": 128}


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


def fewest_found(lengths: list[int], cap: int) -> int:
    return num_micro_batches(lengths, max_tokens=cap, sequences_per_micro_batch=None)


def lognormal_lengths(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [min(8192, 1 + int(draw.lognormvariate(math.log(1000), 1.0))) for _ in range(count)]


@st.composite
def lengths_and_cap(draw: st.DrawFn) -> tuple[list[int], int]:
    cap = draw(st.integers(1, 200))
    return draw(st.lists(st.integers(1, cap), max_size=40)), cap


@st.composite
def cut_up_bins(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(lengths, cap, the best number of bins): bins filled to the brim, cut at random and shuffled."""
    cap, best = draw(st.integers(2, 100)), draw(st.integers(1, 12))
    lengths = []
    for _ in range(best):
        cuts = sorted(draw(st.sets(st.integers(1, cap - 1), max_size=6)))
        lengths += [end - start for start, end in zip([0, *cuts], [*cuts, cap], strict=True)]
    return draw(st.permutations(lengths)), cap, best


def test_pack_takes_each_sequence_once_and_respects_the_cap() -> None:
    for seed in range(300):
        lengths, cap = some_lengths(seed)
        bins = under_cap(lengths, cap)
        assert flat(bins) == list(range(len(lengths)))
        assert max(tokens_of(bins, lengths)) <= cap
        assert all(bins)
        assert len(bins) == fewest_found(lengths, cap)
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
    assert fewest_found([4, 4, 4, 6, 6, 6], 10) == 3  # in this order 4 and 4 would share a bin, and need a fourth


def test_first_fit_is_close_to_the_best_count() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        lengths = [draw.randint(1, 20) for _ in range(7)]
        best = oracle.fewest_bins(lengths, 20)
        assert best <= fewest_found(lengths, 20) <= 11 / 9 * best + 6 / 9


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
    assert num_micro_batches(lengths, max_tokens=None, sequences_per_micro_batch=3) == 3
    padded = pack(lengths, max_tokens=None, sequences_per_micro_batch=3, min_bins=5)
    assert padded == [*bins, [], []]


def test_no_sequences_make_empty_micro_batches() -> None:
    assert under_cap([], 10) == [[]]
    assert pack([], max_tokens=None, sequences_per_micro_batch=2, min_bins=3) == [[], [], []]
    assert under_cap([], 8, min_bins=0) == pack([], max_tokens=None, sequences_per_micro_batch=2, min_bins=0) == [[]]


def test_a_sequence_over_the_cap_is_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match=r"41 tokens but pack\.max_tokens_per_micro_batch = 40"):
        under_cap([3, 41, 5], 40)
    assert under_cap([3, 40, 5], 40) == [[1], [0, 2]]


@pytest.mark.parametrize("both", [None, 5])
def test_one_mode_and_not_two(both: int | None) -> None:
    with pytest.raises(UserError, match="set one of"):
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


@checked
@given(lengths_and_cap(), st.integers(1, 12), st.integers(1, 8), st.booleans())
def test_any_pack_is_complete_under_the_cap_and_repeatable(
    case: tuple[list[int], int], min_bins: int, multiple: int, by_cost: bool
) -> None:
    lengths, cap = case
    cap = -(-cap // multiple) * multiple + min_bins % multiple  # not always a multiple itself
    costs = sequence_costs(lengths, linear=3, quadratic=2) if by_cost else None
    options = {"max_tokens": cap, "sequences_per_micro_batch": None, "multiple": multiple}
    bins = pack(lengths, **options, min_bins=min_bins, costs=costs)
    assert flat(bins) == list(range(len(lengths)))
    assert len(bins) == max(min_bins, num_micro_batches(lengths, **options))
    assert all(tokens + padding_tokens(tokens, multiple) <= cap for tokens in tokens_of(bins, lengths))
    of_each = tokens_of(bins, costs or lengths)
    assert of_each == sorted(of_each, reverse=True)
    assert bins == pack(tuple(lengths), **options, min_bins=min_bins, costs=costs)


@checked
@given(cut_up_bins())
def test_first_fit_is_close_to_a_known_best_count(case: tuple[list[int], int, int]) -> None:
    lengths, cap, best = case
    assert best <= fewest_found(lengths, cap) <= 11 / 9 * best + 6 / 9


@checked
@given(lengths_and_cap())
def test_the_tree_finds_what_a_search_bin_by_bin_finds(case: tuple[list[int], int]) -> None:
    lengths, cap = case
    assert fewest_found(lengths, cap) == max(1, oracle.first_fit_decreasing_bins(lengths, cap))


@checked
@given(some_costs, st.integers(1, 10))
def test_differencing_is_the_plain_one_and_balance_no_worse(costs: list[int], num_bins: int) -> None:
    plain = oracle.differenced(costs, num_bins)
    assert sorted(tokens_of(karmarkar_karp(costs, num_bins), costs)) == plain
    shares = balance(costs, num_bins)
    assert flat(shares) == list(range(len(costs)))
    assert len(shares) == num_bins
    evened = tokens_of(shares, costs)
    assert max(evened) <= max(plain)
    assert max(evened) - min(evened) <= max(costs, default=0)
    assert shares == balance(tuple(costs), num_bins)


@checked
@given(st.integers(0, 2**32), st.sampled_from(["uniform", "lognormal"]), st.booleans())
def test_512_sequences_are_within_2_percent_over_8_ranks(seed: int, kind: str, by_cost: bool) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 4096) for _ in range(512)] if kind == "uniform" else lognormal_lengths(seed, 512)
    costs = sequence_costs(lengths, linear=24_576, quadratic=1) if by_cost else lengths
    assert imbalance(tokens_of(balance(costs, 8), costs)) <= 1.02


def test_swaps_improve_on_differencing() -> None:
    better = 0
    for seed in range(20):
        lengths = lognormal_lengths(seed, 1000)
        plain, evened = (imbalance(tokens_of(split(lengths, 64), lengths)) for split in (karmarkar_karp, balance))
        assert evened <= plain
        better += evened - 1 < (plain - 1) / 4
    assert better > 10


def test_costs_are_even_under_a_tight_cap() -> None:
    """Micro-batches 96 to 99 % full: cut by tokens alone they differ in cost, by cost alone half break the cap."""
    cap, num_mended = 32_768, 0
    linear, quadratic = flop_coefficients(**LLAMA_7B)
    for seed in range(8):
        lengths = lognormal_lengths(seed, 512)
        costs = sequence_costs(lengths, linear=linear, quadratic=4 * quadratic)
        by_tokens = under_cap(lengths, cap)
        by_cost = pack(lengths, max_tokens=cap, sequences_per_micro_batch=None, costs=costs)
        assert max(tokens_of(by_cost, lengths)) <= cap
        assert fill_fraction(tokens_of(by_cost, lengths), cap) > 0.96
        assert imbalance(tokens_of(by_cost, costs)) < imbalance(tokens_of(by_tokens, costs))
        num_mended += max(tokens_of(balance(costs, len(by_cost)), lengths)) > cap
    assert num_mended == 4


@pytest.mark.parametrize("length", [1, 2, 7, 20])
def test_flops_count_every_pair_of_tokens(length: int) -> None:
    sizes = {"matmul_parameters": 1000, "num_layers": 3, "num_heads": 2, "head_dim": 5}
    linear, quadratic = flop_coefficients(**sizes)
    [cost] = sequence_costs([length], linear=linear, quadratic=quadratic)
    assert cost == oracle.forward_flops(length, **sizes)


@checked
@given(st.integers(0, 100), st.integers(1, 20))
def test_padding_is_the_least_that_divides(num_tokens: int, multiple: int) -> None:
    least = next(padding for padding in range(multiple) if (num_tokens + padding) % multiple == 0)
    assert padding_tokens(num_tokens, multiple) == least


def test_a_cap_below_the_padding_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"multiple of 16 tokens but pack\.max_tokens_per_micro_batch = 15; set it to 16"
    ):
        pack([3], max_tokens=15, sequences_per_micro_batch=None, multiple=16)
    with pytest.raises(UserError, match=r"33 tokens but .* = 40, of which 32 can be used"):
        pack([33], max_tokens=40, sequences_per_micro_batch=None, multiple=16)


@checked
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=1)))
def test_waiting_is_what_a_clock_shows(costs: list[list[int]]) -> None:
    """Rank by rank, with a stopwatch: work until done, then wait for the last."""
    elapsed, waited = 0, 0
    for meeting in range(len(costs[0])):
        durations = [rank[meeting] for rank in costs]
        elapsed += max(durations)
        waited += sum(max(durations) - duration for duration in durations)
    assert idle_fraction(costs) == pytest.approx(waited / (len(costs) * elapsed) if elapsed else 0.0)
    totals = [sum(rank) for rank in costs]
    mean = statistics.fmean(totals)
    assert imbalance(totals) == pytest.approx(max(totals) / mean if mean else 1.0)


def test_fill_fraction_counts_empty_micro_batches() -> None:
    assert fill_fraction([70, 70, 70, 0], 100) == 210 / 400


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 25))
def test_neighbours_stay_in_order_and_within_their_limit(sizes: list[int], limit: int) -> None:
    runs = [sizes[run] for run in neighbours_within(sizes, limit)]
    assert [size for run in runs for size in run] == sizes
    assert all(run and (sum(run) <= limit or len(run) == 1) for run in runs)
    assert all(sum(run) + after[0] > limit for run, after in itertools.pairwise(runs))  # no run could be longer
