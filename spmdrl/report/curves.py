"""Curves of one run or several in one picture. The only module that imports matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context, rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from spmdrl.report.console import phase_times
from spmdrl.report.files import MetricsRow
from spmdrl.report.series import Band, History, Series, charts_of, smoothed

Runs = Mapping[str, Sequence[MetricsRow]]  # the rows of each run, by its label in the picture
Bands = Sequence[tuple[str, Band]]  # lines of a chart, by their labels

FAINT_INK = "#7b8794"
RUN_COLORS = ("#2563eb", "#e0672b", "#0d9467", "#b5379f", "#8a6d00", "#52606d")
# As many as a step has phases, so that no two of them look the same.
PHASE_COLORS = (
    *("#2563eb", "#f2a541", "#0d9467", "#b5379f", "#e0532b", "#6bc4d6"),
    *("#8a6d00", "#a78bfa", "#9aa5b1", "#c2274b", "#84b84c", "#52606d"),
)
STYLE = rc_params_from_file(Path(__file__).parent / "page" / "curves.mplstyle", use_default_template=False)
EVAL_STYLE: dict[str, Any] = {
    "linestyle": (0, (4, 2)),
    "linewidth": 1.4,
    "marker": "o",
    "markersize": 5.0,
    "markeredgecolor": "white",
}
# Evaluations and saves happen once in many steps and would only add spikes to the time of a step.
OCCASIONAL_PHASES = ("eval", "save")
# Besides the reward, where a run has them; the time of a step comes last.
SIDE_PANELS = (
    *("rollout/response_tokens", "update/entropy_nats", "mismatch/max_abs_nats", "eval/reward"),
    *("update/k3_ref_nats", "update/k1_ref_nats", "update/k2_ref_nats", "update/grad_norm", "update/lr"),
)
ROWS = (2, 3)  # of small panels; fewer where both leave as little over


def draw_curves(runs: Runs, path: Path) -> None:
    """Write a PNG of one run, or of several in the same axes."""
    with rc_context(STYLE):
        figure_of(runs).savefig(path)


def figure_of(runs: Runs) -> Figure:
    """Draw reward and accuracy large, and diagnostics next to them."""
    histories = {label: History(rows) for label, rows in runs.items()}
    panels = [(chart.title, name) for chart, name in charts_of([*histories.values()]) if name in SIDE_PANELS]
    figure, main, (*sides, times) = _sheet(len(panels) + 1)
    _draw_reward(main, histories)
    for axes, (title, name) in zip(sides, panels, strict=True):
        for history, color in zip(histories.values(), _colors(histories), strict=True):
            _draw_line(axes, history[name], color=color, width=1.8)
        _finish(axes, title=title)
    _draw_step_time(times, runs)
    return figure


def draw_charts(charts: Sequence[tuple[str, Bands]], path: Path) -> None:
    """Write a PNG of charts by their titles: each line the mean of its runs, in a band from their lowest to their
    highest."""
    columns = min(4, len(charts))
    rows = -(-len(charts) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(3.6 * columns, 2.5 * rows + 0.5), dpi=150, layout=_layout(), facecolor="white")
        for place, (title, bands) in enumerate(charts, start=1):
            _draw_bands(figure.add_subplot(rows, columns, place), bands, title=title)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
        figure.savefig(path)


def chart_as_svg(bands: Bands) -> bytes:
    """A chart without a title, to be read on light and on dark pages."""
    out = io.BytesIO()
    with rc_context({**STYLE, "grid.color": FAINT_INK, "grid.alpha": 0.25, "svg.hashsalt": "spmdrl"}):
        figure = Figure(figsize=(3.8, 1.9), layout=_layout())
        _draw_bands(figure.add_subplot(), bands)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()


def _draw_bands(axes: Axes, bands: Bands, *, title: str | None = None) -> None:
    for (label, band), color in zip(bands, _colors(bands), strict=True):
        marker = "o" if len(band.steps) == 1 else None
        axes.plot(band.steps, band.means, color=color, linewidth=1.8, marker=marker, label=label)
        axes.fill_between(band.steps, band.lows, band.highs, color=color, alpha=0.18, linewidth=0.0)
    _finish(axes, title=title, empty="no step in common")


def _layout() -> ConstrainedLayoutEngine:
    return ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.10, wspace=0.03, hspace=0.04)


def _sheet(num_sides: int) -> tuple[Figure, Axes, list[Axes]]:
    """A figure with one large pair of axes, and small ones next to it, of which the last fills what is left."""
    rows = min(ROWS, key=lambda rows: -num_sides % rows)
    columns = -(-num_sides // rows)
    names = [str(min(place, num_sides - 1)) for place in range(rows * columns)]
    mosaic: list[Any] = [["main", "main", *names[row * columns : (row + 1) * columns]] for row in range(rows)]
    # A figure without pyplot needs no window system and has no global state; PNGs are always rendered by Agg.
    figure = Figure(figsize=(5.4 + 3.2 * columns, 2.6 * rows), dpi=150, layout=_layout(), facecolor="white")
    axes = figure.subplot_mosaic(mosaic)
    return figure, axes["main"], [axes[str(place)] for place in range(num_sides)]


def _draw_reward(axes: Axes, runs: Mapping[str, History]) -> None:
    """Draw the reward, faint, with its running mean, and evaluations as dots; the loss if there is no reward."""
    several = len(runs) > 1
    noun, name = ("reward", "reward/mean") if _any_has(runs, "reward/mean") else ("loss", "update/loss")
    for (label, run), color in zip(runs.items(), _colors(runs), strict=True):
        _draw_line(axes, run[name], color=color, width=2.4, label=label if several else f"{noun}, training")
        accuracy = run["eval/accuracy"]
        if len(accuracy):
            dots = None if several else "accuracy, held out"
            colour = color if several else RUN_COLORS[1]
            axes.plot(accuracy.steps, accuracy.values, color=colour, label=dots, **EVAL_STYLE)
    and_dots = ", and accuracy on held-out prompts (dots)" if _any_has(runs, "eval/accuracy") else ""
    title = f"{noun}{and_dots}" if several else next(iter(runs))
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=10)
    axes.legend(loc="lower right" if noun == "reward" else "upper right", fontsize=9.5)
    axes.set_xlabel("step")
    _finish(axes)


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
            _draw_line(axes, Series(steps, seconds.sum(axis=0)), color=color, width=1.8)
        else:
            colors = [PHASE_COLORS[place % len(PHASE_COLORS)] for place in range(len(phases))]
            axes.stackplot(steps, [smoothed(one) for one in seconds], colors=colors, labels=phases, linewidth=0.0)
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=0.9, reverse=True)
    _finish(axes, title="time per step, s")
    if peaks:
        # The first step warms up kernels and caches; one slow step must not squash the others.
        axes.set_ylim(0.0, 1.25 * max(peaks) or 1.0)


def _draw_line(axes: Axes, drawn: Series, *, color: str, width: float, label: str | None = None) -> None:
    axes.plot(drawn.steps, drawn.values, color=color, linewidth=0.9, alpha=0.28)
    marker = "o" if len(drawn) == 1 else None
    axes.plot(drawn.steps, smoothed(drawn.values), color=color, linewidth=width, marker=marker, label=label)


def _finish(axes: Axes, *, title: str | None = None, empty: str = "not measured") -> None:
    """Set the title, the ticks, and a vertical axis from 0 unless there are negative values."""
    if title:
        axes.set_title(title, loc="left", fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_formatter("{x:g}")
    low, high = axes.dataLim.intervaly
    is_drawn = bool(np.isfinite([low, high]).all())
    if is_drawn and low >= 0.0:
        axes.set_ylim(0.0, 1.08 * high or 1.0)
    if not is_drawn:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, empty, transform=axes.transAxes, ha="center", va="center", color=FAINT_INK)


def _colors(lines: Sized) -> list[str]:
    return [RUN_COLORS[place % len(RUN_COLORS)] for place in range(len(lines))]


def _any_has(runs: Mapping[str, History], name: str) -> bool:
    return any(name in run.names for run in runs.values())
