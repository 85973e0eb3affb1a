"""Scalars of a run over its steps, from the rows of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spmdrl.report.files import Row


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

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.names = tuple(dict.fromkeys(name for row in rows for name in row if name != "step"))

    def __getitem__(self, name: str) -> Series:
        """The series of a scalar, empty where the run has none."""
        found = [(row["step"], math.nan if row[name] is None else row[name]) for row in self._rows if name in row]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return Series(np.array(steps, dtype=int), np.array(values, dtype=float))

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
