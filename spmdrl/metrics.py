"""Values that carry their own reduction, so that parts from micro-batches and ranks are merged by the same code.

`merge` is associative and commutative: the whole's value does not depend on how it was cut. Take a part's sum and
count, never its mean, and a mean of means cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over things that were counted; nan when there were none."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """The mean of these values."""
        values = list(values)
        return cls(math.fsum(values), len(values))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Max:
    """The largest; nan as soon as one part is."""

    peak: float

    def merge(self, other: Max) -> Max:
        return Max(_nan_or(max, self.peak, other.peak))

    def value(self) -> float:
        return self.peak


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest; nan as soon as one part is."""

    floor: float

    def merge(self, other: Min) -> Min:
        return Min(_nan_or(min, self.floor, other.floor))

    def value(self) -> float:
        return self.floor


@dataclass(frozen=True, slots=True)
class Total:
    """A sum, such as a number of tokens or of failures."""

    total: float

    def merge(self, other: Total) -> Total:
        return Total(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Values:
    """One number per rollout or per group, kept for a histogram. Never per token: these travel between ranks."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        count = len(self.values)
        assert count <= MAX_VALUES, f"{count} values in one histogram; one per token instead of one per rollout?"

    def merge(self, other: Values) -> Values:
        return Values(self.values + other.values)

    def value(self) -> float:
        # fsum rounds once, so the mean does not depend on the order in which parts were merged.
        return math.fsum(self.values) / len(self.values) if self.values else math.nan


def _nan_or(choose: Callable[[float, float], float], one: float, other: float) -> float:
    # The built-in max() and min() answer nan or not depending on the order of their arguments.
    return math.nan if math.isnan(one) or math.isnan(other) else choose(one, other)


Metric = Mean | Max | Min | Total | Values
Metrics = dict[str, Metric]


def merge_all(parts: list[Metrics]) -> Metrics:
    """Merge by name; a name may be missing from some parts, but must mean the same kind of value in all of them."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _merge(name, merged[name], metric) if name in merged else metric
    return merged


def _merge(name: str, one: Metric, other: Metric) -> Metric:
    kinds = f"{type(one).__name__} and {type(other).__name__}"
    assert type(one) is type(other), f"metric {name} is {kinds}; it must be one of them on every rank"
    return one.merge(other)  # type: ignore[arg-type]  # the same type, as asserted


def scalars(metrics: Metrics) -> dict[str, float]:
    """One number per name."""
    return {name: metric.value() for name, metric in metrics.items()}


def histograms(metrics: Metrics) -> dict[str, list[float]]:
    """The values behind each `Values`."""
    return {name: list(metric.values) for name, metric in metrics.items() if isinstance(metric, Values)}
