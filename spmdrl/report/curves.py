"""Curves of one run or several in one picture. The only module that imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from spmdrl.report.console import phase_times
from spmdrl.report.files import Row

Runs = Mapping[str, Sequence[Row]]  # the rows of each run, by its label in the picture

INK, FAINT_INK, GRID = "#1f2933", "#7b8794", "#e4e7eb"
RUN_COLORS = ("#2563eb", "#e0672b", "#0d9467", "#b5379f", "#8a6d00", "#52606d")
PHASE_COLORS = ("#2563eb", "#7fb3f5", "#0d9467", "#f2a541", "#b5379f", "#8ccfb0", "#9aa5b1")
STYLE: dict[Any, Any] = {
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
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.015,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}
EVAL_STYLE: dict[str, Any] = {
    "linestyle": (0, (4, 2)),
    "linewidth": 1.4,
    "marker": "o",
    "markersize": 5.0,
    "markeredgecolor": "white",
}
# Evaluations and saves happen once in many steps and would only add spikes to the time of a step.
OCCASIONAL_PHASES = ("eval", "save")
SIDE_PANELS = (
    ("response length, tokens", "rollout/response_tokens"),
    ("entropy, nats", "update/entropy_nats"),
    ("largest engine mismatch, nats", "mismatch/max_abs_nats"),
)


def draw_curves(runs: Runs, path: Path) -> None:
    """Write a PNG of one run, or of several in the same axes: reward and accuracy large, diagnostics next to them."""
    with rc_context(STYLE):
        # A figure without pyplot needs no window system and has no global state; PNGs are always rendered by Agg.
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.10, wspace=0.03, hspace=0.04)
        figure = Figure(figsize=(12.0, 5.2), dpi=150, layout=layout, facecolor="white")
        main, *sides, times = figure.subplot_mosaic("aabc;aade").values()
        _draw_reward(main, runs)
        for axes, (title, name) in zip(sides, SIDE_PANELS, strict=True):
            _draw_scalar(axes, runs, name, title=title)
        _draw_step_time(times, runs)
        figure.savefig(path)


def series(rows: Sequence[Row], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and values of a scalar where it was reported; null is read as nan."""
    found = [(row["step"], math.nan if row[name] is None else row[name]) for row in rows if name in row]
    return np.array([step for step, _ in found], dtype=int), np.array([value for _, value in found], dtype=float)


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


def _draw_reward(axes: Axes, runs: Runs) -> None:
    """Draw the reward, faint, with its running mean, and evaluations as dots; the loss if there is no reward."""
    several = len(runs) > 1
    noun, name = ("reward", "reward/mean") if _any_has(runs, "reward/mean") else ("loss", "update/loss")
    for (label, rows), color in zip(runs.items(), _colors(runs), strict=True):
        steps, values = series(rows, name)
        _draw_line(axes, steps, values, color=color, width=2.4, label=label if several else f"{noun}, training")
        steps, accuracy = series(rows, "eval/accuracy")
        if len(steps):
            dots = None if several else "accuracy, held out"
            axes.plot(steps, accuracy, color=color if several else RUN_COLORS[1], label=dots, **EVAL_STYLE)
    and_dots = ", and accuracy on held-out prompts (dots)" if _any_has(runs, "eval/accuracy") else ""
    title = f"{noun}{and_dots}" if several else next(iter(runs))
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=10)
    axes.legend(loc="lower right" if noun == "reward" else "upper right", fontsize=9.5)
    axes.set_xlabel("step")
    _finish(axes)


def _draw_scalar(axes: Axes, runs: Runs, name: str, *, title: str) -> None:
    for rows, color in zip(runs.values(), _colors(runs), strict=True):
        _draw_line(axes, *series(rows, name), color=color, width=1.8)
    _finish(axes, title=title)


def _draw_step_time(axes: Axes, runs: Runs) -> None:
    """Draw the time of one run's phases, stacked, or the sum over phases for each of several runs."""
    peaks = []
    for rows, color in zip(runs.values(), _colors(runs), strict=True):
        trained = [row for row in rows if phase_times(row)]
        seen = dict.fromkeys(phase for row in trained for phase in phase_times(row))
        phases = [phase for phase in seen if phase not in OCCASIONAL_PHASES]
        if not phases:
            continue
        steps = np.array([row["step"] for row in trained])
        seconds = np.array([[row.get(f"time/{phase}_s") or 0.0 for row in trained] for phase in phases])
        peaks.append(np.percentile(seconds.sum(axis=0), 95))
        if len(runs) > 1:
            _draw_line(axes, steps, seconds.sum(axis=0), color=color, width=1.8)
        else:
            colors = [PHASE_COLORS[place % len(PHASE_COLORS)] for place in range(len(phases))]
            axes.stackplot(steps, [smoothed(one) for one in seconds], colors=colors, labels=phases, linewidth=0.0)
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=0.9, reverse=True)
    _finish(axes, title="time per step, s")
    if peaks:
        # The first step warms up kernels and caches; one slow step must not squash the others.
        axes.set_ylim(0.0, 1.25 * max(peaks) or 1.0)


def _draw_line(
    axes: Axes, steps: np.ndarray, values: np.ndarray, *, color: str, width: float, label: str | None = None
) -> None:
    axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.28)
    marker = "o" if len(steps) == 1 else None
    axes.plot(steps, smoothed(values), color=color, linewidth=width, marker=marker, label=label)


def _finish(axes: Axes, *, title: str | None = None) -> None:
    """Set the title, the ticks, and a vertical axis from 0 unless there are negative values."""
    if title:
        axes.set_title(title, loc="left", fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_formatter("{x:g}")
    drawn = np.concatenate([[], *(line.get_ydata() for line in axes.lines)])
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) and drawn.min() >= 0.0:
        axes.set_ylim(0.0, 1.08 * drawn.max() or 1.0)
    if not len(drawn) and not axes.collections:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=FAINT_INK)


def _colors(runs: Runs) -> list[str]:
    return [RUN_COLORS[place % len(RUN_COLORS)] for place in range(len(runs))]


def _any_has(runs: Runs, name: str) -> bool:
    return any(name in row for rows in runs.values() for row in rows)
