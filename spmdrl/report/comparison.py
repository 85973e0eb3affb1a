"""Several runs beside each other: runs that differ by their seed alone are one line, with a band."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.report.reading import RecordedRun
from spmdrl.report.series import Band, History, band

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
        return (
            Final(statistics.fmean(ends), statistics.stdev(ends) if len(ends) > 1 else None, len(ends))
            if ends
            else None
        )


@dataclass(frozen=True, slots=True)
class Final:
    """The mean over runs of a scalar at their end."""

    mean: float
    deviation: float | None  # the sample's standard deviation; None for one run
    num_runs: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Lines, and the settings in which they differ."""

    lines: tuple[Line, ...]
    differences: dict[str, tuple[str, ...]]  # of each setting its value in each line, as TOML would write it


def compare(runs: Sequence[RecordedRun]) -> Comparison:
    """Gather runs to lines, in the order in which they are given."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_telling(run), sort_keys=True, default=str), []).append(run)
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
