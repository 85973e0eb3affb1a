"""Start the ranks of a run, pass on requests to stop, and say how it ended: `python -m spmdrl.faults.supervise`.

The programs in launch/ start torchrun by this. SIGTERM and SIGUSR1 become the file RUN/stop, which the ranks of all
nodes see: torchrun would give them 30 seconds, and passes on no SIGUSR1 that it was not told of. What a rank has left
in the run's folder is printed after torchrun's own report, and decides the exit code: see `docs/faults.md`.

Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import read_posts
from spmdrl.faults.verdict import EXIT_REQUEUE, SUPERVISED, read_error, read_requeue


def supervise(files: FaultFiles, command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the command to its end; returns its exit code, 128 and the signal's number when a signal ended it.

    The first SIGTERM or SIGUSR1 asks the run to stop, any further SIGTERM is the command's.
    """
    files.clear()
    files.stop.unlink(missing_ok=True)
    process: subprocess.Popen[bytes] | None = None

    def ask(number: int, _: FrameType | None) -> None:
        if not files.stop.exists():
            files.folder.mkdir(parents=True, exist_ok=True)
            files.stop.write_text(signal.Signals(number).name, encoding="utf-8")
        elif number == signal.SIGTERM and process is not None:
            process.terminate()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGUSR1)}
    # A terminal's Ctrl-C reaches the command too, which ends by it.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(command, env=dict(environment) | {SUPERVISED: "1"})
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def conclude(files: FaultFiles, code: int) -> tuple[str, int]:
    """What to tell the user about a run whose command has ended with `code`, and the exit code that says it best."""
    if (error := read_error(files)) is not None:
        return error.text(), error.exit_code
    if (requeue := read_requeue(files)) is not None:
        return requeue.text(), EXIT_REQUEUE if requeue.again else 0
    left = [post for post in read_posts(files) if not post.ended]
    if code == 0 or not left:
        return "", code
    places = "; ".join(f"{post.name} was in {post.place}" for post in left[:8])
    more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
    return f"the ranks have ended without a word: {places}{more}", code


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description="Start the ranks of a run and say how it ended.")
    parser.add_argument("--requeue", metavar="COMMAND", help="run this when SIGUSR1 has stopped the run")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what starts the ranks")
    arguments = parser.parse_args(argv)
    files = FaultFiles(arguments.run)
    words, code = conclude(files, supervise(files, arguments.command, os.environ))
    if words:
        print(words, file=sys.stderr, flush=True)
    requeue = read_requeue(files)
    # SIGTERM is the end that someone decided on: what becomes of the job then is not for this program to say.
    if arguments.requeue and code == EXIT_REQUEUE and requeue is not None and requeue.reason == "SIGUSR1":
        subprocess.run(shlex.split(arguments.requeue), check=False)
    return code


if __name__ == "__main__":
    sys.exit(main())
