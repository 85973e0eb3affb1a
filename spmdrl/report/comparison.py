"""Several runs next to each other: runs that differ by their seed alone are one line, with a band; and forecasts."""

from __future__ import annotations

import base64
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spmdrl.faults.text import one_line
from spmdrl.report.curves import RUN_COLORS, Bands, chart_as_svg, draw_charts
from spmdrl.report.pages import assembled
from spmdrl.report.run_folder import RecordedRun
from spmdrl.report.series import Band, Chart, History, band, charts_of
from spmdrl.types import UserError

# What a run is called, its seed, and how it is shown or stopped: nothing that it learns depends on them.
NO_DIFFERENCE = ("run.name", "run.dir", "run.seed", "run.stop_before", "report.", "watchdog.", "export.", "checkpoint.")
FINAL_STEPS = 10  # over which a final value is taken


@dataclass(frozen=True, slots=True)
class Line:
    """Runs with the same settings but for the seed."""

    label: str
    runs: tuple[RecordedRun, ...]

    @property
    def histories(self) -> list[History]:
        return [History(run.rows) for run in self.runs]

    def band(self, name: str) -> Band:
        """A scalar over its runs."""
        return band(history[name] for history in self.histories)

    def final(self, name: str) -> Final | None:
        """A scalar at the end of its runs; None where none of them has it."""
        ends = [end for history in self.histories if (end := _end(history, name)) is not None]
        if not ends:
            return None
        return Final(statistics.fmean(ends), statistics.stdev(ends) if len(ends) > 1 else None)


@dataclass(frozen=True, slots=True)
class Final:
    """The mean over runs of a scalar at their end."""

    mean: float
    deviation: float | None  # the sample's standard deviation; None for one run


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Lines, and the settings in which they differ."""

    lines: tuple[Line, ...]
    differences: dict[str, tuple[str, ...]]  # of each setting its value in each line, as TOML would write it

    def charts(self) -> list[tuple[Chart, str]]:
        """The charts that these runs fill, each with the scalar that fills it."""
        return list(charts_of([history for line in self.lines for history in line.histories]))

    def bands(self, name: str) -> Bands:
        """A scalar over the runs of each line, by the line's label."""
        return [(line.label, line.band(name)) for line in self.lines]


def compare(runs: Sequence[RecordedRun]) -> RunComparison:
    """Gather runs to lines, in the order in which they are given; runs of the same seed are lines of their own."""
    groups: dict[tuple[str, int], list[RecordedRun]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for run in runs:
        settings = json.dumps(_telling(run), sort_keys=True, default=str)
        seed = run.settings.get("run.seed")
        groups.setdefault((settings, seen[settings, str(seed)]), []).append(run)
        seen[settings, str(seed)] += seed is not None
    differences = dict(_differences([group[0] for group in groups.values()]))
    labels = _labels(list(groups.values()), differences)
    lines = tuple(Line(label, tuple(group)) for label, group in zip(labels, groups.values(), strict=True))
    return RunComparison(lines, differences)


def _telling(run: RecordedRun) -> dict[str, Any]:
    """The settings that can make a difference; a run whose settings are not known is like no other."""
    telling = {name: value for name, value in run.settings.items() if not name.startswith(NO_DIFFERENCE)}
    return telling or {"": run.name}


def _differences(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, tuple[str, ...]]]:
    tables = [{} if not run.settings else _telling(run) for run in runs]
    for name in dict.fromkeys(name for table in tables for name in table):
        values = tuple(_written(table[name]) if name in table else "unset" for table in tables)
        if len(set(values)) > 1:
            yield name, values


def _labels(groups: Sequence[Sequence[RecordedRun]], differences: dict[str, tuple[str, ...]]) -> list[str]:
    """Name each line by the setting in which all lines differ, where it is one; else by its runs."""
    if len(differences) == 1:
        ((name, values),) = differences.items()
        if len(set(values)) == len(values):
            return [f"{name} = {value}" for value in values]
    names = [", ".join(run.name for run in group) for group in groups]
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, start=1)]


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _end(history: History, name: str) -> float | None:
    """Mean of a scalar's reports in the last `FINAL_STEPS` steps of the run; its last one where there are none."""
    known = history[name].finite()
    if not len(known):
        return None
    last = known.after(history.last_step - FINAL_STEPS).values
    return float(last.mean()) if len(last) else float(known.values[-1])


# A comparison of runs as a picture, and as one HTML page with pictures, final values and the settings that differ.


def draw_comparison(compared: RunComparison, path: Path) -> None:
    """Write a PNG of every chart that these runs fill."""
    draw_charts([(chart.title, compared.bands(name)) for chart, name in compared.charts()], path)


def comparison_page(compared: RunComparison) -> str:
    """Return the page as HTML that needs no other file."""
    return assembled(
        "compare",
        title="Comparison of " + ", ".join(run.name for line in compared.lines for run in line.runs),
        lines=compared.lines,
        num_colors=len(RUN_COLORS),
        charts=[
            {
                "title": chart.title,
                "name": name,
                "picture": base64.b64encode(chart_as_svg(compared.bands(name))).decode(),
                "finals": [line.final(name) for line in compared.lines],
            }
            for chart, name in compared.charts()
        ],
        final_steps=FINAL_STEPS,
        differences=compared.differences,
    )


# A forecast of a run's end from its first half, by the sigmoid of ScaleRL (arXiv 2510.13786, equation 1).
#
#     R(C) = R0 + (A - R0) / (1 + (Cmid / C)^B)
#
# R0 is the first evaluation, C the steps since then, A what the run approaches, Cmid the steps to half of the way, and
# B how suddenly it comes.


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
    steps: np.ndarray, values: np.ndarray, *, noise: float = 0.0, bounds: tuple[float, float] = NO_BOUNDS
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
    chance = np.random.default_rng(0)
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
