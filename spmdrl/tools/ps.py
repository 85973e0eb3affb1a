"""The ranks of a run, and where they are: `python -m spmdrl.tools.ps RUN`; with `dump`, the stacks of those here."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import RankStatus, own_host, process_state, read_posts
from spmdrl.faults.stacks import ask_descendants, ask_for_stacks, size_of, text_after
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.report.console import format_duration

DUMP_WAIT_S = 1.0  # for the processes to write

_COLUMNS = ("rank", "host", "pid", "step", "phase", "for", "state")


def table(posts: Sequence[RankStatus], *, host: str, now: float) -> Iterator[str]:
    """A line for each rank."""
    rows = [_COLUMNS, *(_row(post, host, now) for post in posts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _row(post: RankStatus, host: str, now: float) -> tuple[str, ...]:
    age = "" if post.ended else format_duration(max(0.0, now - post.moved_at))
    return (str(post.rank), post.host, str(post.pid), str(post.step), post.phase, age, _state(post, host))


def _state(post: RankStatus, host: str) -> str:
    if post.ended:
        return "ended"
    if post.host != host:
        return "on another host"
    state = process_state(post.pid)
    return {None: "gone", "T": "stopped"}.get(state, "running")


def dump(files: FaultFiles, posts: Sequence[RankStatus], *, host: str) -> Iterator[str]:
    """The stacks of the ranks on this host and of their engines, as they write them to their logs now."""
    sizes = {post.rank: size_of(files.log_of(post.rank)) for post in posts}
    asked = [post for post in posts if not post.ended and post.host == host and ask_for_stacks(post.pid)]
    for post in asked:
        ask_descendants(post.pid)
    time.sleep(DUMP_WAIT_S if asked else 0.0)
    for post in posts:
        if post in asked:
            yield f"== {post.name}, {post.place}"
            stopped = process_state(post.pid) == "T"
            written = text_after(files.log_of(post.rank), sizes[post.rank]).rstrip()
            yield written or ("it is stopped; it will write when it goes on" if stopped else "it has not answered")
        elif not post.ended:
            yield f"== {post.name}: {_state(post, host)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m spmdrl.tools.ps", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, such as runs/demo")
    parser.add_argument("what", nargs="?", choices=["dump"], help="the stacks instead of the table")
    arguments = parser.parse_args(argv)
    files, host = FaultFiles(arguments.run), own_host()
    posts = read_posts(files)
    if not posts:
        parser.error(f"{arguments.run} has no ranks to show: no run has been started there")
    if arguments.what == "dump":
        print("\n".join(dump(files, posts, host=host)))
        return 0
    print("\n".join(table(posts, host=host, now=time.time())))
    for verdict in (read_error(files), read_requeue(files)):
        if verdict is not None:
            print(f"\n{verdict.text()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
