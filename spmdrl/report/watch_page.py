"""A run as it is now, drawn for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from spmdrl.faults.text import escaped
from spmdrl.report.charts import GROUPS
from spmdrl.report.console import SHOWN, draw, format_duration, format_number
from spmdrl.report.files import Row
from spmdrl.report.series import History
from spmdrl.report.watching import RankHealth, Snapshot

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
        yield Rule(f"samples of step {run.samples[-1].get('step')}", style="dim", align="left")
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
    shown = run.ranks if len(run.ranks) <= _MAX_RANKS else _standing_out(run.ranks)
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


def _standing_out(ranks: Sequence[RankHealth]) -> list[RankHealth]:
    """The silent ranks first, then those that have been still for the longest."""
    return sorted(ranks, key=lambda rank: (rank.state != "silent", -rank.still_s))[:_MAX_RANKS]


def _samples(samples: Sequence[Row]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for sample in samples:
        reward = sample.get("reward")
        table.add_row(
            Text("reward " + (format_number(reward) if isinstance(reward, int | float) else "none"), style="bold"),
            Text(escaped(str(sample.get("prompt", "")))[-60:], style="dim"),
            Text(escaped(str(sample.get("response", "")))),
        )
    return table
