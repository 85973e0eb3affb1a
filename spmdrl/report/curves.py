"""A run, or several, as one picture. The only module that imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spmdrl.report.console import phase_times
from spmdrl.report.files import Row

INK, FAINT_INK, GRID = "#1f2933", "#7b8794", "#e4e7eb"
RUN_COLORS = ("#2563eb", "#e0672b", "#0d9467", "#b5379f", "#8a6d00", "#52606d")
PHASE_COLORS = ("#2563eb", "#7fb3f5", "#0d9467", "#f2a541", "#b5379f", "#8ccfb0", "#9aa5b1")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT_INK,
    "xtick.color": FAINT_INK,
    "ytick.color": FAINT_INK,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
# An evaluation or a save comes once in many steps; in the time of a step it would be a comb of spikes.
OCCASIONAL_PHASES = ("eval", "save")


@dataclass(frozen=True, slots=True)
class Panel:
    """One scalar over the steps; the first of `names` that the runs have."""

    title: str
    names: tuple[str, ...]


SIDE_PANELS = (
    Panel("response length, tokens", ("rollout/response_tokens",)),
    Panel("entropy, nats", ("update/entropy_nats",)),
    Panel("trainer/engine mismatch, largest in nats", ("mismatch/max_abs_nats",)),
)


def draw_curves(runs: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Write a PNG of the rows of each run, by its label: reward and accuracy large, what explains them beside it."""
    with rc_context(STYLE):
        # Figure without pyplot: no window system, no global state, and saving to PNG always goes through Agg.
        figure = Figure(figsize=(12.0, 5.2), dpi=150, layout="constrained", facecolor="white")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.10, wspace=0.03, hspace=0.04)
        main, *sides = figure.subplot_mosaic("aabc;aade").values()
        _draw_reward(main, runs)
        for axes, panel in zip(sides, SIDE_PANELS, strict=False):
            _draw_panel(axes, panel, runs)
        _draw_step_time(sides[-1], runs)
        for axes in (main, *sides):
            _finish(axes)
        figure.savefig(path)


def _draw_reward(axes: Axes, runs: Mapping[str, Sequence[Row]]) -> None:
    """The reward of each step, faint, under its running mean; evaluations as points."""
    several = len(runs) > 1
    name, title = ("reward/mean", "reward") if _any_has(runs, "reward/mean") else ("update/loss", "loss")
    for number, (label, rows) in enumerate(runs.items()):
        color = _run_color(number)
        _draw_smoothed(
            axes, *series(rows, name), color=color, label=label if several else f"{title}, training", width=2.4
        )
        steps, accuracy = series(rows, "eval/accuracy")
        axes.plot(
            steps,
            accuracy,
            color=color if several else RUN_COLORS[1],
            linewidth=1.4,
            linestyle=(0, (4, 2)),
            marker="o",
            markersize=5.0,
            markeredgecolor="white",
            label=None if several or not len(steps) else "accuracy, held out",
        )
    also = ", and accuracy on held-out prompts (dots)" if several and _any_has(runs, "eval/accuracy") else ""
    axes.set_title(
        f"{title}{also}" if several else next(iter(runs), ""), loc="left", fontsize=13, fontweight="bold", pad=10
    )
    axes.legend(loc="lower right" if title == "reward" else "upper right", fontsize=9.5)
    axes.set_xlabel("step")


def _draw_panel(axes: Axes, panel: Panel, runs: Mapping[str, Sequence[Row]]) -> None:
    name = next((name for name in panel.names if _any_has(runs, name)), panel.names[0])
    drawn = []
    for number, rows in enumerate(runs.values()):
        steps, values = series(rows, name)
        _draw_smoothed(axes, steps, values, color=_run_color(number), label=None, width=1.8)
        drawn += list(values[np.isfinite(values)])
    _title(axes, panel.title)
    if not drawn:
        _say_not_measured(axes)
    elif min(drawn) >= 0.0:
        axes.set_ylim(bottom=0.0)


def _draw_step_time(axes: Axes, runs: Mapping[str, Sequence[Row]]) -> None:
    """One run: its phases, stacked. Several: the sum of each."""
    _title(axes, "time per step, s")
    times = [[phase_times(row) for row in rows if row["step"] > 0] for rows in runs.values()]
    steps = [[row["step"] for row in rows if row["step"] > 0] for rows in runs.values()]
    phases = list(
        dict.fromkeys(phase for run in times for row in run for phase in row if phase not in OCCASIONAL_PHASES)
    )
    if not phases:
        _say_not_measured(axes)
        return
    by_phase = [np.array([[row.get(phase) or 0.0 for row in run] for phase in phases]) for run in times]
    if len(runs) == 1:
        colors = [PHASE_COLORS[place % len(PHASE_COLORS)] for place in range(len(phases))]
        smooth = [smoothed(seconds) for seconds in by_phase[0]]
        axes.stackplot(steps[0], smooth, colors=colors, labels=phases, linewidth=0.0)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=0.9)
    else:
        for number, seconds in enumerate(by_phase):
            _draw_smoothed(
                axes, np.array(steps[number]), seconds.sum(axis=0), color=_run_color(number), label=None, width=1.8
            )
    # The first step warms up compilers and caches; one slow step must not flatten the rest.
    axes.set_ylim(0.0, 1.25 * max(np.percentile(seconds.sum(axis=0), 95) for seconds in by_phase))


def _draw_smoothed(
    axes: Axes, steps: np.ndarray, values: np.ndarray, *, color: str, label: str | None, width: float
) -> None:
    axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.28)
    axes.plot(steps, smoothed(values), color=color, linewidth=width, label=label if len(steps) else None)


def series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a scalar where it was reported; null, which stood for nan, is nan again."""
    found = [(row["step"], math.nan if row[name] is None else row[name]) for row in rows if name in row]
    return np.array([step for step, _ in found]), np.array([value for _, value in found], dtype=float)


def smoothed(values: np.ndarray) -> np.ndarray:
    """A centred running mean over about a twentieth of the run, shorter towards both ends; nan is passed over."""
    reach = len(values) // 40
    windows = (
        values[max(0, at - r) : at + r + 1] for at in range(len(values)) for r in [min(at, len(values) - 1 - at, reach)]
    )
    return np.array([np.nanmean(window) if np.isfinite(window).any() else math.nan for window in windows])


def _any_has(runs: Mapping[str, Sequence[Row]], name: str) -> bool:
    return any(name in row for rows in runs.values() for row in rows)


def _run_color(number: int) -> str:
    return RUN_COLORS[number % len(RUN_COLORS)]


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9.5, color=INK)


def _say_not_measured(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=FAINT_INK)


def _finish(axes: Axes) -> None:
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.015)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
