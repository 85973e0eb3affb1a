"""Show the ranks of a run and their phases: `python -m spmdrl.tools.ps RUN`; with `dump`, the stacks of local ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmdrl.config.strict import shown
from spmdrl.faults.files import FaultFiles, read_json
from spmdrl.faults.rank_status import RankStatus, own_host, process_state, read_statuses
from spmdrl.faults.stacks import ask_descendants, ask_for_stacks, size_of, text_after
from spmdrl.faults.text import Parser, one_line, say
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.report.console import format_duration
from spmdrl.tools.program import program
from spmdrl.types import UserError

DUMP_WAIT_S = 1.0  # for the processes to write

_COLUMNS = ("rank", "host", "pid", "step", "phase", "for", "state")


def table(statuses: Sequence[RankStatus], *, host: str, now: float) -> Iterator[str]:
    """Yield the lines of a table, one for each rank."""
    rows = [_COLUMNS, *(_row(status, host, now) for status in statuses)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(status: RankStatus, host: str, now: float) -> tuple[str, ...]:
    age = "" if status.ended else format_duration(max(0.0, now - status.moved_at))
    place = (str(status.rank), one_line(status.host), str(status.pid), str(status.step), one_line(status.phase))
    return (*place, age, _state(status, host))


def unreadable(files: FaultFiles, statuses: Sequence[RankStatus]) -> Iterator[str]:
    """Yield a line for each status file that `read_statuses` left out, with what it says all the same."""
    known = {files.status_of(status.rank) for status in statuses}
    for path in sorted({*files.statuses.glob("rank-*.json")} - known):
        content = read_json(path) or {}
        said = ", ".join(f"{name} {content[name]}" for name in ("host", "pid", "step", "phase") if name in content)
        name = f"{files.statuses.name}/{path.name}"
        yield one_line(f"{name} is damaged, so nobody knows where its rank is{f'; it says: {said}' if said else ''}")


def _state(status: RankStatus, host: str) -> str:
    if status.ended:
        return "ended"
    if status.host != host:
        return "on another host"
    state = process_state(status.pid)
    return {None: "gone", "T": "stopped"}.get(state, "running")


def dump(files: FaultFiles, statuses: Sequence[RankStatus], *, host: str) -> Iterator[str]:
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


@program("cannot show the ranks")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    parser = Parser(prog="python -m spmdrl.tools.ps", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, such as runs/demo")
    parser.add_argument("what", nargs="?", choices=["dump"], help="show stacks instead of the table")
    arguments = parser.parse_args(argv)
    files, host = FaultFiles(arguments.run), own_host()
    statuses = read_statuses(files)
    damaged = [*unreadable(files, statuses)]
    if not (statuses or damaged):
        raise UserError(f"{shown(arguments.run)} has no ranks to show: no run has been started there")
    if arguments.what == "dump":
        say("\n".join([*dump(files, statuses, host=host), *damaged]))
        return 0
    say("\n".join([*table(statuses, host=host, now=time.time()), *damaged]))
    for verdict in (read_error(files), read_requeue(files)):
        if verdict is not None:
            say(f"\n{verdict.text()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
