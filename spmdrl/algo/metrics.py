"""Values that carry their own reduction, so that parts from micro-batches and ranks are merged by the same code.

`merge` is associative and commutative: the whole's value does not depend on how it was cut. Take a part's sum and
count, never its mean, and a mean of means cannot be written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from spmdrl.algo.evaluation import interval_of_share

MAX_VALUES = 1 << 20
MAX_WORST = 10


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
    """One number per rollout or per group, for a histogram. Never per token: these travel between ranks."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        count = len(self.values)
        assert count <= MAX_VALUES, f"{count} values in one histogram; one per token instead of one per rollout?"

    def merge(self, other: Values) -> Values:
        return Values(self.values + other.values)

    def value(self) -> float:
        # fsum rounds once, so the mean does not depend on the order in which parts were merged.
        return math.fsum(self.values) / len(self.values) if self.values else math.nan


@dataclass(frozen=True, slots=True)
class EffectiveFraction:
    """Kish's effective sample size over the sample's size, (sum w)^2 / (n sum w^2): 1 when n things weigh the same, 0
    when none weighs anything, nan when there are none."""

    total: float  # sum of the weights
    squares: float  # sum of their squares
    count: float

    def merge(self, other: EffectiveFraction) -> EffectiveFraction:
        return EffectiveFraction(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        if not self.count:
            return math.nan
        return self.total / self.squares * self.total / self.count if self.squares else 0.0


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 - var(target - estimate) / var(target): 1 for perfect estimates, 0 for any constant, below 0 for worse; nan
    when all targets are equal, or there are none."""

    targets: float  # sum
    target_squares: float
    errors: float  # sum of target - estimate
    error_squares: float
    count: float

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """Add the sums of two groups of tokens."""
        return ExplainedVariance(
            self.targets + other.targets,
            self.target_squares + other.target_squares,
            self.errors + other.errors,
            self.error_squares + other.error_squares,
            self.count + other.count,
        )

    def value(self) -> float:
        """Return the fraction, at most 1; nan where it has no meaning."""
        if not self.count:
            return math.nan
        spread = self.target_squares - self.targets * self.targets / self.count
        # Equal targets leave what rounding left of them.
        if spread <= 1e-12 * self.target_squares:
            return math.nan
        return 1 - (self.error_squares - self.errors * self.errors / self.count) / spread


@dataclass(frozen=True, slots=True)
class RootMean:
    """The root of a mean of squares, such as the standard deviation of centred numbers; nan when there were none."""

    squares: float  # sum
    count: float

    def merge(self, other: RootMean) -> RootMean:
        return RootMean(self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        return math.sqrt(self.squares / self.count) if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Correlation:
    """The correlation of two centred numbers, -1 to 1; nan where one of them does not vary."""

    products: float  # sum
    squares: float
    other_squares: float

    def merge(self, other: Correlation) -> Correlation:
        return Correlation(
            self.products + other.products, self.squares + other.squares, self.other_squares + other.other_squares
        )

    def value(self) -> float:
        size = math.sqrt(self.squares) * math.sqrt(self.other_squares)
        return self.products / size if size else math.nan


@dataclass(frozen=True, slots=True)
class ShareBound:
    """A bound of the interval of a share over prompts; see `interval_of_share`."""

    is_upper: bool
    total: float  # sum of the prompts' means
    squares: float
    count: float

    @classmethod
    def both(cls, means: Iterable[float]) -> tuple[ShareBound, ShareBound]:
        """The lower and the upper bound for prompts with these means."""
        means = list(means)
        sums = math.fsum(means), math.fsum(mean * mean for mean in means), float(len(means))
        return cls(False, *sums), cls(True, *sums)

    def merge(self, other: ShareBound) -> ShareBound:
        assert self.is_upper == other.is_upper
        return ShareBound(
            self.is_upper, self.total + other.total, self.squares + other.squares, self.count + other.count
        )

    def value(self) -> float:
        return interval_of_share(self.total, self.squares, self.count)[self.is_upper]


@dataclass(frozen=True, slots=True)
class Balance:
    """How evenly tokens are spread over the experts of each layer; means over layers, nan when there are no tokens.

    `is_peak`: the load of the busiest expert over the mean load, 1 at best; else the entropy of the loads over that of
    equal ones, 1 at best and 0 where one expert has everything.
    """

    is_peak: bool
    num_experts: int
    loads: tuple[float, ...]  # tokens of each expert, layer after layer

    def merge(self, other: Balance) -> Balance:
        assert (self.is_peak, self.num_experts) == (other.is_peak, other.num_experts)
        loads = tuple(one + another for one, another in zip(self.loads, other.loads, strict=True))
        return Balance(self.is_peak, self.num_experts, loads)

    def value(self) -> float:
        layers = list(zip(*[iter(self.loads)] * self.num_experts, strict=True))
        if not all(map(math.fsum, layers)):
            return math.nan
        return math.fsum(map(self._of_layer, layers)) / len(layers)

    def _of_layer(self, loads: tuple[float, ...]) -> float:
        total = math.fsum(loads)
        if self.is_peak:
            return max(loads) * self.num_experts / total
        shares = [load / total for load in loads if load]
        return -math.fsum(share * math.log(share) for share in shares) / math.log(max(2, self.num_experts))


@dataclass(frozen=True, slots=True)
class TokenValue:
    """A number about one token, and where that token is."""

    value: float
    sequence_index: int  # place of its rollout in the step's global order
    position: int  # its place in the sequence, from 0
    token_ids: tuple[int, ...]  # some of the tokens before it, and itself, the last
    rollout_logprob: float  # nats
    sequence_segment: int = 0  # place of its sequence among those of its rollout


@dataclass(frozen=True, slots=True)
class Worst:
    """The `MAX_WORST` tokens whose numbers are the greatest in size; those that are exactly 0 do not count."""

    tokens: tuple[TokenValue, ...]

    def merge(self, other: Worst) -> Worst:
        return Worst(tuple(sorted(self.tokens + other.tokens, key=_size_then_place)[:MAX_WORST]))

    def value(self) -> float:
        return abs(self.tokens[0].value) if self.tokens else 0.0


def _size_then_place(token: TokenValue) -> tuple[float, int, int, int]:
    """Sort by size, the greatest first, nan before all others."""
    size = math.inf if math.isnan(token.value) else abs(token.value)
    return -size, token.sequence_index, token.sequence_segment, token.position


def _nan_or(choose: Callable[[float, float], float], one: float, other: float) -> float:
    # The built-in max() and min() answer nan or not depending on the order of their arguments.
    return math.nan if math.isnan(one) or math.isnan(other) else choose(one, other)


Metric = (
    Mean
    | Max
    | Min
    | Total
    | Values
    | EffectiveFraction
    | ExplainedVariance
    | RootMean
    | Correlation
    | ShareBound
    | Balance
    | Worst
)
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


def worst_tokens(metrics: Metrics) -> dict[str, tuple[TokenValue, ...]]:
    """The tokens behind each `Worst`, the worst first."""
    return {name: metric.tokens for name, metric in metrics.items() if isinstance(metric, Worst)}


# Metrics that are still on the device: many are fetched at once, so that the host waits once for all of them.


@dataclass(frozen=True, slots=True)
class Deferred:
    """A metric and the numbers it is made of; float64 holds those of float32, and integers below 2^53, exactly."""

    numbers: Tensor  # of any shape
    of: Callable[[list[float]], Metric]  # makes the metric from the numbers, flattened


def fetched(parts: list[dict[str, Deferred]]) -> list[Metrics]:
    """Copy all numbers to the host in one transfer, for which it waits, and make the metrics."""
    every = [metric.numbers.double().flatten() for part in parts for metric in part.values()]
    numbers = iter(torch.cat(every).tolist() if every else [])
    return [
        {name: metric.of(list(islice(numbers, metric.numbers.numel()))) for name, metric in part.items()}
        for part in parts
    ]
