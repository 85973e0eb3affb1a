"""Scalars of a run over its steps, from the rows of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spmdrl.report.files import MetricsRow

_LARGEST = 1e300  # beyond it sums, margins and ticks of a chart overflow


@dataclass(frozen=True, slots=True)
class Series:
    """A scalar at the n steps that reported it, in their order."""

    steps: np.ndarray  # [n] int
    values: np.ndarray  # [n] float, nan where the run wrote null

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> Series:
        """The part whose values are finite."""
        known = np.isfinite(self.values)
        return Series(self.steps[known], self.values[known])

    def after(self, step: float) -> Series:
        """The part after a step."""
        later = self.steps > step
        return Series(self.steps[later], self.values[later])


class History:
    """All scalars of a run."""

    def __init__(self, rows: Sequence[MetricsRow]) -> None:
        self._rows = rows
        self.names = tuple(dict.fromkeys(name for row in rows for name in row if name != "step"))

    def __getitem__(self, name: str) -> Series:
        """The series of a scalar, empty where the run has none."""
        found = [(row["step"], math.nan if row[name] is None else row[name]) for row in self._rows if name in row]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return Series(np.array(steps, dtype=int), np.clip(np.array(values, dtype=float), -_LARGEST, _LARGEST))

    @property
    def last_step(self) -> int:
        """The last step that was reported; 0 before the first."""
        return max((int(row["step"]) for row in self._rows), default=0)

    def matching(self, prefix: str, suffix: str = "") -> Iterator[tuple[str, Series]]:
        """Yield the names that begin and end so, with their series."""
        for name in self.names:
            if name.startswith(prefix) and name.endswith(suffix):
                yield name, self[name]


def smoothed(values: np.ndarray) -> np.ndarray:
    """Average over a centred window of about a twentieth of the run, half of that at the ends; nan is skipped."""
    place = np.arange(len(values))
    full_reach = len(values) // 40
    reach = np.clip(np.minimum(place, place[::-1]), full_reach // 2, full_reach)
    low, high = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(values))
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


@dataclass(frozen=True, slots=True)
class Band:
    """A scalar over several runs, at the n steps that all of them have reported."""

    steps: np.ndarray  # [n] int
    means: np.ndarray  # [n] float
    lows: np.ndarray  # [n] the lowest of the runs
    highs: np.ndarray  # [n] the highest


def band(several: Iterable[Series]) -> Band:
    """Lay runs over each other: their mean, smoothed, between their lowest and their highest value.

    It ends where the first of them ends, so that no step compares fewer runs than another.
    """
    known = [one.finite() for one in several]
    known = [one for one in known if len(one)]
    shared = sorted(set.intersection(*(set(one.steps.tolist()) for one in known))) if known else []
    if not shared:
        return Band(np.array([], dtype=int), *(np.array([]) for _ in range(3)))
    table = np.array([smoothed(one.values[np.isin(one.steps, shared)]) for one in known])  # [runs, n]
    return Band(np.array(shared), table.mean(axis=0), table.min(axis=0), table.max(axis=0))


# Which curves of a run are shown, in which order, and under which names: one table for all pictures.


@dataclass(frozen=True, slots=True)
class Chart:
    """Scalars that share a pair of axes."""

    title: str
    names: tuple[str, ...]

    def name_in(self, runs: Sequence[History]) -> str | None:
        """The first of its scalars that any of these runs has measured."""
        return next((name for name in self.names if any(len(run[name].finite()) for run in runs)), None)


# By what they are about, the most important first. The first of a chart's names that a run has is drawn: a run has one
# estimator of its divergence, for example.
GROUPS: dict[str, tuple[Chart, ...]] = {
    "Outcome": (
        Chart("reward", ("reward/mean",)),
        Chart("accuracy, held out", ("eval/accuracy",)),
        Chart("reward, held out", ("eval/reward",)),
        Chart("loss", ("update/loss",)),
        Chart("loss, held out", ("eval/loss",)),
        Chart("accuracy of pairs", ("pairs/accuracy",)),
        Chart("margin of pairs", ("pairs/margin",)),
        Chart("margin, held out", ("eval/margin",)),
    ),
    "Responses": (
        Chart("response length, tokens", ("rollout/response_tokens",)),
        Chart("entropy, nats", ("update/entropy_nats",)),
        Chart("responses that were cut, fraction", ("rollout/truncated_fraction",)),
        Chart("groups whose rewards agree, fraction", ("reward/equal_groups_fraction",)),
    ),
    "Engine and trainer": (
        Chart("largest mismatch, nats", ("mismatch/max_abs_nats",)),
        Chart("mean mismatch, nats", ("mismatch/mean_abs_nats",)),
    ),
    "Update": (
        Chart(
            "divergence from the reference, nats", ("update/k3_ref_nats", "update/k1_ref_nats", "update/k2_ref_nats")
        ),
        Chart("ratios that were clipped, fraction", ("update/clip_fraction",)),
        Chart("gradient norm", ("update/grad_norm",)),
        Chart("learning rate", ("update/lr",)),
        Chart("variance that the critic explains", ("critic/explained_variance",)),
    ),
    "Speed and memory": (
        Chart("loss tokens per second", ("speed/loss_tokens_per_s",)),
        Chart("time of a step, s", ("time/step_s",)),
        Chart("peak memory of a rank, GiB", ("memory/peak_gib",)),
    ),
}


def charts_of(runs: Sequence[History]) -> Iterator[tuple[Chart, str]]:
    """Yield the charts that these runs fill, each with the scalar that fills it."""
    for chart in (chart for charts in GROUPS.values() for chart in charts):
        name = chart.name_in(runs)
        if name is not None:
            yield chart, name
