"""Programs that show what runs have written, from their folders alone: `spmdrl watch`, `ps`, `plot`, `compare`,
`episodes` and `sync`. The run may be on any machine that shares its files."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.live import Live

from spmdrl.config.base import NonNegativeInt, Seconds
from spmdrl.config.strict import shown
from spmdrl.faults.failure import ask_descendants, ask_for_stacks, size_of, text_after
from spmdrl.faults.files import FaultFiles, read_json
from spmdrl.faults.rank_status import RankStatus, own_host, process_state, read_statuses
from spmdrl.faults.text import Parser, one_line, say
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.report.console import format_duration
from spmdrl.report.run_folder import RunFolder, read_steps
from spmdrl.report.sinks import SinkFailed, sink_problems, sinks_of
from spmdrl.report.sinks import sync as send_to
from spmdrl.report.watching import Watcher, watch_page
from spmdrl.tools.program import ToolConsole, option, program, writing
from spmdrl.types import UserError

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
    # Ctrl-C: the user has seen enough. A run that has not begun is waited for.
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
