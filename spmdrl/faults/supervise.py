"""Start the ranks of a run, pass on stop requests, and report how it ended: `python -m spmdrl.faults.supervise`.

The programs that start ranks do it through this. SIGTERM and SIGUSR1 become the file RUN/stop, which the ranks of
all nodes see: torchrun itself would kill them after 30 seconds, and forwards SIGUSR1 only if an option names it. The
verdict that a rank has left in the run's folder is printed after torchrun's own report and decides the exit code: see
`docs/faults.md`.

Needs only the standard library.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Protocol

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import read_statuses
from spmdrl.faults.verdict import EXIT_REQUEUE, SUPERVISED, read_error, read_requeue


class Started(Protocol):
    """The process that the ranks run under."""

    def wait(self) -> int:
        """Wait for its end; returns its exit code, negative if a signal has ended it."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM to it."""
        ...


def supervise(files: FaultFiles, start: Callable[[], Started]) -> int:
    """Start the ranks and return their exit code, which is 128 plus the signal's number if a signal ended them.

    The first SIGTERM or SIGUSR1 makes the run stop; later SIGTERMs are forwarded to what was started.
    """
    files.clear()
    files.stop.unlink(missing_ok=True)
    process: Started | None = None

    def request_stop(number: int, _: FrameType | None) -> None:
        if not files.stop.exists():
            files.folder.mkdir(parents=True, exist_ok=True)
            files.stop.write_text(signal.Signals(number).name, encoding="utf-8")
        elif number == signal.SIGTERM and process is not None:
            process.terminate()

    before = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    # A terminal sends Ctrl-C to the command too, which ends by itself.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = start()
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def conclude(files: FaultFiles, code: int) -> tuple[str, int]:
    """Return a message for the user and an exit code for a run whose command ended with `code`."""
    if (error := read_error(files)) is not None:
        return error.text(), error.exit_code
    if (requeue := read_requeue(files)) is not None:
        return requeue.text(), EXIT_REQUEUE if requeue.again else 0
    left = [status for status in read_statuses(files) if not status.ended]
    if code == 0 or not left:
        return "", code
    places = "; ".join(f"{status.name} was in {status.place}" for status in left[:8])
    more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
    return f"the ranks ended without an error message: {places}{more}", code


def finish(files: FaultFiles, code: int) -> int:
    """Tell the user how a run ended whose command ended with `code`; returns the exit code for it."""
    text, code = conclude(files, code)
    if text:
        print(text, file=sys.stderr, flush=True)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    parser = argparse.ArgumentParser(description="Start the ranks of a run and report how it ended.")
    parser.add_argument("--requeue", metavar="COMMAND", help="run this when SIGUSR1 has stopped the run")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command that starts the ranks")
    arguments = parser.parse_args(argv)
    if not arguments.command or shutil.which(arguments.command[0]) is None:
        parser.error("name the run's folder, then the command that starts the ranks, such as torchrun")
    files = FaultFiles(arguments.run)
    environment = os.environ | {SUPERVISED: "1"}
    code = finish(files, supervise(files, lambda: subprocess.Popen(arguments.command, env=environment)))
    requeue = read_requeue(files)
    # After SIGTERM, whoever sent it decides what becomes of the job.
    if arguments.requeue and code == EXIT_REQUEUE and requeue is not None and requeue.reason == "SIGUSR1":
        subprocess.run(shlex.split(arguments.requeue), check=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
