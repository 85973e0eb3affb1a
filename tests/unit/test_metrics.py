"""Metrics: however a whole is cut into parts, and in whatever order they are merged, its value is the same."""

from __future__ import annotations

import itertools
import math

import pytest

from spmdrl.algo.metrics import (
    ExplainedVariance,
    Max,
    Mean,
    Metric,
    Metrics,
    Min,
    Total,
    Values,
    histograms,
    merge_all,
    scalars,
)

# Sums of these are exact in floating point, so equal means equal.
PARTS: list[tuple[Metric, Metric, Metric]] = [
    (Mean(1.5, 2), Mean(-4.0, 1), Mean(0.0, 0)),
    (Max(1.0), Max(-math.inf), Max(3.0)),
    (Min(1.0), Min(math.inf), Min(-3.0)),
    (Total(1.0), Total(0.25), Total(-8.0)),
    (Values((3.0, 1.0)), Values(()), Values((0.1, 0.2, 0.3))),
    (
        ExplainedVariance(3.0, 5.0, 0.5, 0.25, 2),
        ExplainedVariance(0, 0, 0, 0, 0),
        ExplainedVariance(-4.0, 16.0, 1, 1, 1),
    ),
]


@pytest.mark.parametrize("parts", PARTS)
def test_merge_is_associative(parts: tuple[Metric, Metric, Metric]) -> None:
    a, b, c = parts
    assert a.merge(b).merge(c) == a.merge(b.merge(c))


@pytest.mark.parametrize("parts", PARTS)
def test_value_does_not_depend_on_the_order_of_merging(parts: tuple[Metric, Metric, Metric]) -> None:
    values = {a.merge(b).merge(c).value() for a, b, c in itertools.permutations(parts)}
    assert len(values) == 1


@pytest.mark.parametrize("cut", range(6))
def test_mean_over_unequal_parts_is_the_mean_of_the_whole(cut: int) -> None:
    whole = [1.0, 0.0, 5.0, 2.5, -3.0]
    parts = Mean.of(whole[:cut]).merge(Mean.of(whole[cut:]))
    assert parts.value() == Mean.of(whole).value() == sum(whole) / len(whole)
    assert Values(tuple(whole[:cut])).merge(Values(tuple(whole[cut:]))).value() == Mean.of(whole).value()


def test_mean_of_nothing_is_nan() -> None:
    assert math.isnan(Mean.of([]).value())
    assert math.isnan(Values(()).value())


@pytest.mark.parametrize("kind", [Max, Min])
def test_nan_is_never_hidden_by_a_number(kind: type[Max] | type[Min]) -> None:
    for one, other in ((math.nan, 1.0), (1.0, math.nan), (math.nan, math.inf)):
        assert math.isnan(kind(one).merge(kind(other)).value())


def test_merge_all_equals_merging_one_by_one_and_leaves_the_parts_alone() -> None:
    first: Metrics = {"reward/mean": Mean(2.0, 4), "update/grad_norm": Max(1.0)}
    second: Metrics = {"reward/mean": Mean(1.0, 1), "batch/loss_tokens": Total(7.0)}
    before = dict(first), dict(second)
    merged = merge_all([first, second, first])
    assert merged == {
        "reward/mean": Mean(5.0, 9),
        "update/grad_norm": Max(1.0),
        "batch/loss_tokens": Total(7.0),
    }
    assert (first, second) == before
    assert merge_all([merge_all([first, second]), first]) == merged
    assert merge_all([]) == {}


def test_one_name_with_two_kinds_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="reward/mean is Mean and Max"):
        merge_all([{"reward/mean": Mean(1.0, 1)}, {"reward/mean": Max(1.0)}])


def test_scalars_has_every_name_and_histograms_only_those_with_values() -> None:
    metrics: Metrics = {"reward/mean": Values((1.0, 0.0)), "update/loss": Mean(3.0, 2)}
    assert scalars(metrics) == {"reward/mean": 0.5, "update/loss": 1.5}
    assert histograms(metrics) == {"reward/mean": [1.0, 0.0]}
