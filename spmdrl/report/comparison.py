"""Several runs beside each other: runs that differ by their seed alone are one line, with a band."""

from __future__ import annotations

import base64
import html
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.faults.text import escaped
from spmdrl.report.console import format_number
from spmdrl.report.curves import RUN_COLORS, Bands, chart_as_svg, draw_charts
from spmdrl.report.pages import assembled
from spmdrl.report.run_folder import RecordedRun
from spmdrl.report.series import Band, Chart, History, band, charts_of

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
        """The scalars of each run."""
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
class Comparison:
    """Lines, and the settings in which they differ."""

    lines: tuple[Line, ...]
    differences: dict[str, tuple[str, ...]]  # of each setting its value in each line, as TOML would write it

    def charts(self) -> list[tuple[Chart, str]]:
        """The charts that these runs fill, each with the scalar that fills it."""
        return list(charts_of([history for line in self.lines for history in line.histories]))

    def bands(self, name: str) -> Bands:
        """A scalar over the runs of each line, by the line's label."""
        return [(line.label, line.band(name)) for line in self.lines]


def compare(runs: Sequence[RecordedRun]) -> Comparison:
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
    return Comparison(lines, differences)


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


def draw_comparison(compared: Comparison, path: Path) -> None:
    """Write a PNG of every chart that these runs fill."""
    draw_charts([(chart.title, compared.bands(name)) for chart, name in compared.charts()], path)


def comparison_page(compared: Comparison) -> str:
    """Write the page."""
    lines, charts = compared.lines, compared.charts()
    title = "Comparison of " + ", ".join(run.name for line in lines for run in line.runs)
    markup = "\n".join(
        [
            f"<h1>{_text(title)}</h1>",
            _legend(lines),
            '<div class="charts">',
            *(_figure(chart.title, name, compared.bands(name)) for chart, name in charts),
            "</div>",
            "<h2>Final values</h2>",
            f"<p>Means over the last {FINAL_STEPS} steps, and over runs, with the standard deviation between runs.</p>",
            _table(
                ["", *(line.label for line in lines)],
                ((chart.title, [_final(line.final(name)) for line in lines]) for chart, name in charts),
            ),
            "<h2>Settings that differ</h2>",
            _differences_table(compared),
        ]
    )
    return assembled("compare", title=escaped(title), markup=markup)


def _legend(lines: tuple[Line, ...]) -> str:
    entries = []
    for place, line in enumerate(lines):
        runs = ", ".join(f"{run.name} (seed {run.settings.get('run.seed', 'unknown')})" for run in line.runs)
        entries.append(
            f'<li class="l{place % len(RUN_COLORS)}"><span class="swatch"></span>{_text(line.label)} '
            f"<small>{_text(runs)}</small></li>"
        )
    return f'<ul class="legend">{"".join(entries)}</ul>' + (
        "<p>A band is from the lowest to the highest of runs that differ by their seed alone; the line is their mean."
        " Curves are smoothed.</p>"
        if any(len(line.runs) > 1 for line in lines)
        else "<p>Curves are smoothed.</p>"
    )


def _differences_table(compared: Comparison) -> str:
    if not compared.differences:
        return "<p>None.</p>"
    rows = ((name, [_text(value) for value in values]) for name, values in compared.differences.items())
    return _table(["", *(line.label for line in compared.lines)], rows)


def _final(final: Final | None) -> str:
    if final is None:
        return "<small>not measured</small>"
    spread = "" if final.deviation is None else f" <small>± {format_number(final.deviation)}</small>"
    return f"{format_number(final.mean)}{spread}"


def _table(head: Iterable[str], rows: Iterable[tuple[str, list[str]]]) -> str:
    """A table; the cells of its rows are markup."""
    top = "".join(f"<th>{_text(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{_text(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(title: str, name: str, bands: Bands) -> str:
    picture = base64.b64encode(chart_as_svg(bands)).decode()
    return (
        f"<figure><figcaption>{_text(title)}<code>{_text(name)}</code></figcaption>"
        f'<img src="data:image/svg+xml;base64,{picture}" alt="{_text(title)} by step"></figure>'
    )


def _text(text: str) -> str:
    return html.escape(escaped(text))
