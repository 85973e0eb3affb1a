"""A run as it is now, read from its files alone: it may be on another machine, and begin, end or go on meanwhile."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import BEAT_S, BEATS_MISSED, RankStatus, furthest_behind, read_statuses
from spmdrl.faults.text import escaped
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.report.console import SHOWN, Progress, draw, format_duration, format_number
from spmdrl.report.files import Row, last_rows, read_scalars
from spmdrl.report.findings import Finding, findings
from spmdrl.report.run_folder import RunFolder, read_num_steps
from spmdrl.report.series import GROUPS, History
from spmdrl.types import UserError

SILENT_S = BEAT_S * BEATS_MISSED  # as the ranks themselves count it
NUM_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """A rank, and what its beats say."""

    status: RankStatus
    silent_s: float  # since its last beat
    still_s: float  # since it entered its phase, or made progress in it

    @property
    def state(self) -> str:
        """`ended`, `silent` or `alive`."""
        if self.status.ended:
            return "ended"
        return "silent" if self.silent_s > SILENT_S else "alive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run at one moment."""

    name: str
    rows: Sequence[Row]
    num_steps: int
    ranks: Sequence[RankHealth]
    samples: Sequence[Row]  # the newest last
    findings: Sequence[Finding]
    verdict: str  # how the launch ended; empty while it has not
    trouble: str  # why something could not be read; empty where all was

    @property
    def has_started(self) -> bool:
        """True once a launch has left a trace."""
        return bool(self.rows or self.ranks)

    @property
    def state(self) -> str:
        """The run in a few words."""
        if self.verdict:
            return "ended: see below"
        if not self.has_started:
            return "not begun"
        states = {rank.state for rank in self.ranks}
        if not states:
            return "no ranks to see"
        if states == {"ended"}:
            return "ended"
        return "ranks are silent" if "silent" in states else "running"

    def progress(self) -> Progress:
        """The progress that the run's own console shows. Its clock counts the time of the steps."""
        now = 0.0
        progress = Progress(num_steps=self.num_steps, start_step=0, clock=lambda: now)
        for row in self.rows:
            if row.get("time/step_s") is None:
                progress.end_eval(row)
            else:
                now += row["time/step_s"]
                progress.end_step(row["step"], row)
        running = [rank for rank in self.ranks if not rank.status.ended]
        last = furthest_behind([rank.status for rank in running])
        slowest = next((rank for rank in running if rank.status in last), running[0] if running else None)
        if slowest is not None and not self.verdict:
            progress.begin_phase(slowest.status.phase)
            progress.phase = (slowest.status.phase, now - slowest.still_s)
        return progress


@dataclass(slots=True)
class Watcher:
    """Reads a run again and again. What cannot be read just now is shown as it was read last."""

    path: Path
    _rows: list[Row] = field(default_factory=list)
    _stamp: tuple[int, int] | None = None  # of metrics.jsonl when it was read
    _findings: list[Finding] = field(default_factory=list)
    _beats: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)  # of a launch's rank, since when

    def read(self, *, now: float) -> Snapshot:
        """Read the run's folder; `now` is unix time."""
        folder, files = RunFolder(self.path), FaultFiles(self.path)
        trouble = self._read_rows(folder.metrics)
        verdicts = [one.text() for one in (read_error(files), read_requeue(files)) if one is not None]
        last_step = History(self._rows).last_step
        return Snapshot(
            name=Path(os.path.realpath(self.path)).name,
            rows=self._rows,
            num_steps=read_num_steps(folder.plan) or last_step,
            ranks=[self._health(status, files, now) for status in read_statuses(files)],
            samples=last_rows(folder.samples, NUM_SAMPLES),
            findings=self._findings,
            verdict="\n".join(verdicts),
            trouble=trouble,
        )

    def _read_rows(self, metrics: Path) -> str:
        """Read metrics.jsonl if it has changed; returns why it could not be read."""
        try:
            stat = metrics.stat()
            stamp = stat.st_mtime_ns, stat.st_size
            if stamp != self._stamp:
                self._rows = read_scalars(metrics)
                self._findings, self._stamp = findings(History(self._rows)), stamp
        except FileNotFoundError:
            self._rows, self._findings, self._stamp = [], [], None
        except (OSError, UserError) as error:
            return str(error)  # perhaps half of a row that is being written: the next reading has it whole
        return ""

    def _health(self, status: RankStatus, files: FaultFiles, now: float) -> RankHealth:
        rank = status.launch, status.rank
        beat, since = self._beats.get(rank, (-1, 0.0))
        if status.beat != beat:
            # At the first reading the file's time says how old the beat is.
            since = now if beat >= 0 else min(now, _written_at(files.status_of(status.rank), now))
            self._beats[rank] = status.beat, since
        return RankHealth(status=status, silent_s=now - since, still_s=max(0.0, now - status.moved_at))


def _written_at(path: Path, now: float) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return now


# A run as it is now, drawn for a terminal.


_MAX_RANKS = 8  # in the table; of a larger run those that stand out
_MAX_VERDICT_LINES = 6
_STATE_STYLES = {"running": "bold green", "ended": "bold", "not begun": "dim"}


def watch_page(run: Snapshot, *, width: int) -> RenderableType:
    """Draw the page."""
    parts: list[RenderableType] = [
        draw(run.progress(), title=escaped(run.name), width=width),
        Padding(Group(*_sections(run)), (0, 1)),
    ]
    return Group(*parts)


def _sections(run: Snapshot) -> Iterator[RenderableType]:
    yield Text.assemble((run.state, _STATE_STYLES.get(run.state, "bold red")), "   ", _others(run))
    if run.trouble:
        yield Text(escaped(run.trouble), style="yellow")
    if run.verdict:
        for line in run.verdict.splitlines()[:_MAX_VERDICT_LINES]:
            yield Text(escaped(line), style="red")
    yield Rule("ranks", style="dim", align="left")
    yield _ranks(run)
    if run.findings:
        yield Rule("what looks wrong", style="yellow", align="left")
        for finding in run.findings:
            yield Text.assemble((finding.rule.name, "bold yellow"), ": ", escaped(finding.seen))
        yield Text("tools.doctor says why it matters, and what to set", style="dim")
    if run.samples:
        yield Rule(f"samples of step {escaped(str(run.samples[-1].get('step')))}", style="dim", align="left")
        yield _samples(run.samples)


def _others(run: Snapshot) -> str:
    """Return the newest scalars that the table of the run's own console leaves out."""
    history = History(run.rows)
    shown = {one.name for one in SHOWN} | {"time/step_s", "update/loss"}
    charts = [chart for group in ("Engine and trainer", "Update", "Speed and memory") for chart in GROUPS[group]]
    values = [
        f"{chart.title} {format_number(float(history[name].finite().values[-1]))}"
        for chart in charts
        if (name := chart.name_in([history])) is not None and name not in shown
    ]
    return "   ".join(values)


def _ranks(run: Snapshot) -> RenderableType:
    if not run.ranks:
        return Text("none has written its status yet", style="dim")
    states = Counter(rank.state for rank in run.ranks)
    summary = Text(", ".join(f"{count} {state}" for state, count in states.items()), style="dim")
    shown = run.ranks
    if len(shown) > _MAX_RANKS:  # the silent ones first, then those that have been still for the longest
        shown = sorted(shown, key=lambda rank: (rank.state != "silent", -rank.still_s))[:_MAX_RANKS]
    table = Table.grid(padding=(0, 2, 0, 0))
    for rank in shown:
        status, silent = rank.status, rank.state == "silent"
        table.add_row(
            f"rank {status.rank}",
            Text(escaped(status.host)),
            Text(escaped(status.place)),
            Text("" if status.ended else f"for {format_duration(rank.still_s)}"),
            Text(
                f"no beat for {format_duration(rank.silent_s)}" if silent else rank.state,
                style="bold red" if silent else "green",
            ),
        )
    return Group(summary, table)


def _end_of(text: str, length: int = 60) -> str:
    return text if len(text) <= length else f"…{text[1 - length :]}"


def _samples(samples: Sequence[Row]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for sample in samples:
        reward = sample.get("reward")
        table.add_row(
            Text("reward " + (format_number(reward) if isinstance(reward, int | float) else "none"), style="bold"),
            Text(_end_of(escaped(str(sample.get("prompt", "")))), style="dim"),
            Text(escaped(str(sample.get("response", "")))),
        )
    return table
