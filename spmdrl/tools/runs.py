"""Programs that show what runs have written, from their folders alone: `spmdrl watch`, `ps`, `plot`, `compare`,
`episodes` and `sync`. The run may be on any machine that shares its files.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from spmdrl.config.base import NonNegativeInt, Seconds
from spmdrl.config.strict import shown
from spmdrl.faults.failure import ask_descendants, ask_for_stacks, size_of, text_after
from spmdrl.faults.files import FaultFiles, read_json
from spmdrl.faults.rank_status import (
    BEAT_S,
    BEATS_MISSED,
    RankStatus,
    furthest_behind,
    own_host,
    process_state,
    read_statuses,
)
from spmdrl.faults.text import Parser, escaped, one_line, say
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.report.console import SHOWN, Progress, draw, format_duration, format_number
from spmdrl.report.files import MetricsRow, last_rows, read_scalars
from spmdrl.report.findings import Finding, findings
from spmdrl.report.run_folder import RunFolder, read_num_steps, read_steps
from spmdrl.report.series import GROUPS, History
from spmdrl.report.sinks import SinkFailed, sink_problems, sinks_of
from spmdrl.report.sinks import sync as send_to
from spmdrl.tools.program import ToolConsole, option, program, writing
from spmdrl.types import UserError

# A run as it is now, read from its files alone: it may be on another machine, and begin, end or continue meanwhile.


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
    rows: Sequence[MetricsRow]
    num_steps: int
    ranks: Sequence[RankHealth]
    samples: Sequence[MetricsRow]  # the newest last
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
    _rows: list[MetricsRow] = field(default_factory=list)
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


def _end_of(text: str) -> str:
    return text if len(text) <= 60 else f"…{text[-59:]}"


def _samples(samples: Sequence[MetricsRow]) -> Table:
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


# The programs.


DUMP_WAIT_S = 1.0  # for the processes to write their stacks
NOT_TRAINED = -1  # index of a greedy baseline, which has no place in the step's order

_COLUMNS = ("rank", "host", "pid", "step", "phase", "for", "state")


def _parser(main: Callable[..., Any], runs: str = "run", **options: Any) -> Parser:
    """The parser of a program, which takes the folder of a run, or several as `runs`."""
    parser = Parser(
        description=inspect.cleandoc(main.__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(runs, metavar="RUN", type=Path, help="a run's folder, such as runs/demo", **options)
    return parser


@program("cannot watch")
def watch(argv: Sequence[str] | None = None) -> None:
    """Show a run as it is now, on a terminal, drawn again every second; Ctrl-C leaves.

    Where the output is no terminal, or with `--once`, it prints one page.
    """
    parser = _parser(watch)
    parser.add_argument("--once", action="store_true", help="print one page")
    parser.add_argument("--every", metavar="SECONDS", type=option(Seconds), default=1.0, help="default: %(default)s")
    given = parser.parse_args(argv)
    watcher, console = Watcher(given.run), ToolConsole()
    if given.once or not console.is_terminal:
        snapshot = watcher.read(now=time.time())
        if not snapshot.has_started:
            raise UserError(f"{watcher.path} holds no run; name a run's folder, such as runs/demo")
        console.print(watch_page(snapshot, width=console.width))
        return
    # Ctrl-C: the user has seen enough. A run that has not started is waited for.
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(watch_page(watcher.read(now=time.time()), width=console.width), refresh=True)
            time.sleep(given.every)


@program("cannot show the ranks")
def ps(argv: Sequence[str] | None = None) -> None:
    """Show the ranks of a run and their phases; with `dump`, the stacks of local ranks."""
    parser = _parser(ps)
    parser.add_argument("what", nargs="?", choices=["dump"], help="show stacks instead of the table")
    given = parser.parse_args(argv)
    files, host = FaultFiles(given.run), own_host()
    statuses = read_statuses(files)
    damaged = [*_unreadable(files, statuses)]
    if not (statuses or damaged):
        raise UserError(f"{shown(given.run)} has no ranks to show: no run has been started there")
    if given.what == "dump":
        say("\n".join([*_dump(files, statuses, host), *damaged]))
        return
    say("\n".join([*_table(statuses, host), *damaged]))
    for verdict in (read_error(files), read_requeue(files)):
        if verdict is not None:
            say(f"\n{verdict.text()}")


def _table(statuses: Sequence[RankStatus], host: str) -> Iterator[str]:
    """Yield the lines of a table, one for each rank."""
    now, rows = time.time(), [_COLUMNS]
    for one in statuses:
        age = "" if one.ended else format_duration(max(0.0, now - one.moved_at))
        place = (str(one.rank), one_line(one.host), str(one.pid), str(one.step), one_line(one.phase))
        rows.append((*place, age, _state(one, host)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _state(status: RankStatus, host: str) -> str:
    if status.ended:
        return "ended"
    if status.host != host:
        return "on another host"
    return {None: "gone", "T": "stopped"}.get(process_state(status.pid), "running")


def _unreadable(files: FaultFiles, statuses: Sequence[RankStatus]) -> Iterator[str]:
    """Yield a line for each status file that `read_statuses` left out, with what can be read of it."""
    known = {files.status_of(status.rank) for status in statuses}
    for path in sorted({*files.statuses.glob("rank-*.json")} - known):
        content = read_json(path) or {}
        said = ", ".join(f"{name} {content[name]}" for name in ("host", "pid", "step", "phase") if name in content)
        name = f"{files.statuses.name}/{path.name}"
        yield one_line(f"{name} is damaged, so nobody knows where its rank is{f'; it says: {said}' if said else ''}")


def _dump(files: FaultFiles, statuses: Sequence[RankStatus], host: str) -> Iterator[str]:
    """Make the ranks on this host and their engines write their stacks to their logs, and yield them."""
    sizes = {status.rank: size_of(files.log_of(status.rank)) for status in statuses}
    asked = [one for one in statuses if not one.ended and one.host == host and ask_for_stacks(one.pid)]
    for status in asked:
        ask_descendants(status.pid)
    time.sleep(DUMP_WAIT_S if asked else 0.0)
    for status in statuses:
        if status in asked:
            yield f"== {status.name}, {status.place}"
            stopped = process_state(status.pid) == "T"
            written = text_after(files.log_of(status.rank), sizes[status.rank]).rstrip()
            yield written or ("stopped: it will write its stacks when it is continued" if stopped else "no response")
        elif not status.ended:
            yield f"== {status.name}: {_state(status, host)}"
    if all(status.ended for status in statuses):
        yield "all ranks have ended: there are no stacks to show"


@program("cannot draw")
def plot(argv: Sequence[str] | None = None) -> None:
    """Draw the curves of one run, or of several in one picture."""
    from spmdrl.report.curves import draw_curves

    parser = _parser(plot, "runs", nargs="+")
    parser.add_argument("--out", metavar="PNG", type=Path, help="default: RUN/curves.png; for several runs curves.png")
    given = parser.parse_args(argv)
    out = given.out or (RunFolder(given.runs[0]).curves if len(given.runs) == 1 else Path("curves.png"))
    if out.suffix != ".png":
        parser.error(f"--out {out}: curves are drawn as PNG; give the file a name that ends in .png")
    names = [Path(os.path.realpath(run)).name for run in given.runs]
    labels = map(one_line, names if len(set(names)) == len(names) else map(str, given.runs))
    draw_curves({label: read_steps(run).rows for label, run in zip(labels, given.runs, strict=True)}, out)
    say(f"wrote {shown(out)}")


@program("cannot compare")
def compare(argv: Sequence[str] | None = None) -> None:
    """Write the curves, final values and differing settings of runs as one page.

    Runs that differ by their seed alone are one line, with a band from the lowest to the highest of them. With
    `--output` ending in .png it is a picture of the curves. With `--fit` it says what the first half of the evaluations
    predicts of the last, by ScaleRL's sigmoid.
    """
    from spmdrl.report import comparison

    parser = _parser(compare, "runs", nargs="+")
    parser.add_argument(
        "--fit", action="store_true", help="no page: fit the first half of each run's evaluations, and predict the last"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("compare.html"), help="default: %(default)s"
    )
    given = parser.parse_args(argv)
    if given.fit:
        from spmdrl.report.comparison import forecast_lines

        for path in given.runs:
            say("\n".join(forecast_lines(read_steps(path), path)))
        return
    compared = comparison.compare([read_steps(path) for path in given.runs])
    with writing(given.output):
        if given.output.suffix == ".png":
            comparison.draw_comparison(compared, given.output)
        else:
            given.output.write_text(comparison.comparison_page(compared), encoding="utf-8")
    say(f"wrote {shown(given.output)}")


@program("cannot show episodes")
def episodes(argv: Sequence[str] | None = None) -> None:
    """Write the episodes of a recorded step as one HTML page.

    It shows what each policy read and wrote, token by token, with its turns, tool calls and rewards. It needs the
    rollouts that `debug.save_rollouts` saved, and the tokenizer of the run's model; it opens in a browser without a
    network.
    """
    parser = _parser(episodes)
    parser.add_argument("--step", type=option(NonNegativeInt), required=True, help="a step whose rollouts were saved")
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: RUN/episodes-STEP.html")
    parser.add_argument(
        "--prompt", metavar="ID", type=option(NonNegativeInt), help="show the episodes of one prompt only"
    )
    given = parser.parse_args(argv)
    folder = RunFolder(given.run)
    page = _episodes_page(folder, given.step, given.prompt)
    output = given.output or folder.episodes(given.step)
    with writing(output):
        output.write_text(page, encoding="utf-8")
    say(f"wrote {shown(output)}")


def _episodes_page(folder: RunFolder, step: int, prompt_id: int | None) -> str:
    """The page of a run's step, of all prompts or of one. Raises UserError when there is nothing to show."""
    import torch

    from spmdrl.config import Config, read_config
    from spmdrl.data.tokenizer import load_tokenizer
    from spmdrl.replay.recorder import read_trainer_logprobs
    from spmdrl.report.episodes import ShownEpisode, episodes_page
    from spmdrl.rollout.files import as_collected, read_parts

    folder.require_launch()
    model = read_config(Config, str(folder.config), []).model
    parts = read_parts(folder.rollouts, step)
    trainers = read_trainer_logprobs(folder.rollouts, step, num_ranks=parts[0].num_ranks)
    collected = as_collected(parts, group_size=parts[0].config["rollout"]["group_size"])
    ids, found = set(), []
    for rollout, outcome in (one for part in parts for one in part.outcomes):
        ids.add(rollout.prompt.prompt_id)
        if prompt_id not in (None, rollout.prompt.prompt_id):
            continue
        index = NOT_TRAINED if rollout.is_baseline else collected.index_of(rollout)
        of_trainer = [(one, trainers.get((index, one.token_ids))) for one in rollout.trajectories]
        # In float32, as the run's own mismatch.
        mismatch = [None if ours is None else (ours - torch.tensor(one.logprobs)).tolist() for one, ours in of_trainer]
        found.append(ShownEpisode(rollout=rollout, outcome=outcome, mismatch=mismatch))
    if not ids:
        raise UserError(f"step {step} has no episodes: it was recorded without any prompt group")
    if not found:
        known = ", ".join(map(str, sorted(ids)))
        raise UserError(f"--prompt {prompt_id}: step {step} has no such prompt; its prompts: {known}")
    return episodes_page(
        found,
        load_tokenizer(model.path, model.trust_remote_code),
        run=Path(os.path.realpath(folder.path)).name,
        step=step,
        shows_mismatch=bool(trainers),
    )


@program("cannot send everything")
def sync(argv: Sequence[str] | None = None) -> None:
    """Send a run's metrics to the sinks of its configuration, as far as they have not got them."""
    parser = _parser(sync)
    run: Path = parser.parse_args(argv).run
    if not RunFolder(run).config.is_file():
        raise UserError(f"{shown(run)} holds no run; name a run's folder, such as runs/demo")
    sinks, settings = sinks_of(run)
    if not sinks:
        raise UserError(f"{shown(run)} has no sinks; add a table such as [report.sinks.wandb] to its config.toml")
    if problems := [*sink_problems(sinks)]:
        raise UserError("\n".join(problems))
    failed = []
    for kind, cfg in sinks.items():
        try:
            said = send_to(run, kind, cfg, settings, until=lambda sender: sender.send())
        except SinkFailed as error:
            failed.append(f"{kind}: {error}")
        else:
            say("\n".join([f"{kind} has everything", *(f"{kind}: {sentence}" for sentence in said)]))
    if failed:
        raise UserError("\n".join(failed))
