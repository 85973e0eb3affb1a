"""A forecast of a run's end from its first half, by the sigmoid of ScaleRL (arXiv 2510.13786, equation 1).

    R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B)

R0 is the first evaluation, C the steps since then, A what the run approaches, Cmid the steps to half of the way, and B
how suddenly it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmdrl.faults.text import one_line
from spmdrl.report.run_folder import RecordedRun
from spmdrl.report.series import History
from spmdrl.types import UserError

LEVEL = 0.9  # of the interval
MEASURES = ("eval/accuracy", "eval/reward")  # the first that a run has
NO_BOUNDS = (-np.inf, np.inf)
_PARAMETERS = 3
_SMALLEST = _PARAMETERS + 1  # evaluations after the first, in the first half
_DRAWS = 300
_STEEPNESS = np.geomspace(0.3, 6.0, 60)  # B
_MIDDLES = 200  # of Cmid, from the first evaluation's steps to some times the run's


@dataclass(frozen=True, slots=True)
class Curve:
    """A fitted sigmoid."""

    start: float  # R0
    asymptote: float  # A
    steepness: float  # B
    middle: float  # Cmid, in steps

    def at(self, steps: float) -> float:
        """Return the value after a number of steps."""
        return self.start + (self.asymptote - self.start) * float(_rise(steps, self.steepness, self.middle))


@dataclass(frozen=True, slots=True)
class Forecast:
    """The last value of a series, as its first half predicts it."""

    curve: Curve
    num_values: int
    num_fitted: int  # the first of them
    fitted_to: int  # step
    last_step: int
    low: float
    high: float
    measured: float

    @property
    def predicted(self) -> float:
        """The value of the curve at the last step."""
        return self.curve.at(self.last_step)

    @property
    def holds(self) -> bool:
        """True when the last value lies in the interval."""
        return self.low <= self.measured <= self.high


def forecast(
    steps: np.ndarray,
    values: np.ndarray,
    *,
    noise: float = 0.0,
    bounds: tuple[float, float] = NO_BOUNDS,
    seed: int = 0,
) -> Forecast:
    """Fit the first half of n values at these steps, of which the first is that of the untrained policy, and predict
    the last.

    The interval is that of a parametric bootstrap: curves with the noise that is seen around the fit, or `noise`, the
    standard deviation of one value, where that is more; each is fitted again, and noise is added to what it predicts.
    Values are within the bounds. Raises UserError for fewer than twice as many values as the fit needs.
    """
    begins, steps, values = values[0], steps[1:] - steps[0], values[1:]
    half = len(steps) // 2
    if half < _SMALLEST:
        raise UserError(
            f"{len(steps) + 1} evaluations are too few to fit a curve to half of them; {2 * _SMALLEST + 1} are needed: "
            "lower eval.every"
        )
    known, seen, last = steps[:half].astype(float), values[:half], float(steps[-1])
    grid = _Grid(known, begins, last, bounds)
    curve = grid.fit(seen)
    fitted = np.array([curve.at(step) for step in known])
    deviation = max(noise, float(np.sqrt(np.sum((seen - fitted) ** 2) / (half - _PARAMETERS))))
    chance = np.random.default_rng(seed)
    ends = [
        grid.fit(fitted + chance.normal(0.0, deviation, half)).at(last) + chance.normal(0.0, deviation)
        for _ in range(_DRAWS)
    ]
    low, high = np.clip(np.quantile(ends, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]), *bounds)
    return Forecast(
        curve, len(values) + 1, half + 1, int(known[-1]), int(last), float(low), float(high), float(values[-1])
    )


class _Grid:
    """Sigmoids of all steepnesses and middles; for each the best asymptote follows by least squares."""

    def __init__(self, steps: np.ndarray, start: float, last: float, bounds: tuple[float, float]) -> None:
        middles = np.geomspace(steps[0] / 2, 2 * last, _MIDDLES)
        steepness, middle = (axis.ravel() for axis in np.meshgrid(_STEEPNESS, middles, indexing="ij"))
        self._start, self._bounds, self._steepness, self._middle = start, bounds, steepness, middle
        self._rises = _rise(steps, steepness[:, None], middle[:, None])  # [candidates, n]
        self._squares = (self._rises**2).sum(-1)

    def fit(self, values: np.ndarray) -> Curve:
        """Return the curve with the smallest sum of squared differences from these values, [n]."""
        above = values - self._start
        along = self._rises @ above
        smallest, largest = self._bounds
        gain = np.clip(along / self._squares, smallest - self._start, largest - self._start)
        error = gain * (gain * self._squares - 2 * along)  # and the squares of `above`, which all share
        best = int(error.argmin())
        return Curve(
            self._start, self._start + float(gain[best]), float(self._steepness[best]), float(self._middle[best])
        )


def _rise(steps: float | np.ndarray, steepness: float | np.ndarray, middle: float | np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + (np.asarray(middle) / steps) ** steepness)


def forecast_run(run: RecordedRun, name: str) -> tuple[str, Forecast]:
    """Predict a run's last evaluation; returns what it measures, and the forecast.

    Raises UserError, with the run's name, where it has none or too few.
    """
    history = History(run.rows)
    measure = next((measure for measure in MEASURES if len(history[measure].finite())), None)
    if measure is None:
        raise UserError(f"{name} has no evaluations to fit; set [eval] and eval.every")
    series = history[measure].finite()
    is_share = measure == "eval/accuracy"
    widths = history["eval/ci95_high"].values - history["eval/ci95_low"].values if is_share else np.array([])
    noise = float(np.nanmedian(widths)) / 3.92 if len(widths) and np.isfinite(widths).any() else 0.0
    return measure, forecast(series.steps, series.values, noise=noise, bounds=(0.0, 1.0) if is_share else NO_BOUNDS)


def forecast_lines(run: RecordedRun, folder: Path) -> list[str]:
    """Say what the first half of a run's evaluations predicts of the last. Raises UserError where it has too few."""
    name = one_line(folder.name)
    measure, found = forecast_run(run, name)
    curve, verdict = found.curve, "inside" if found.holds else "outside"
    return [
        f"{name}: {measure} at {found.num_values} steps; the first {found.num_fitted}, to step {found.fitted_to}, are "
        "fitted:",
        f"  from {curve.start:.3g} towards A = {curve.asymptote:.3g}, half way after {curve.middle:.3g} steps, "
        f"B = {curve.steepness:.2g}",
        f"  at step {found.last_step} this predicts {found.predicted:.3g} ({LEVEL:.0%}: {found.low:.3g} to "
        f"{found.high:.3g}); measured {found.measured:.3g}, {verdict}",
    ]
