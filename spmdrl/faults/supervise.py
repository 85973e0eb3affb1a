"""Check a run, start its ranks, pass on requests to stop, and report how it ended.

The programs in launch/ start a run through this: `local.py` on one machine, `slurm.py` on the nodes of a job. SIGTERM
and SIGUSR1 become the file RUN/stop, which the ranks of all nodes see: the program that starts the ranks would end them
after a while. The verdict that a rank has left in the run's folder is printed last and decides the exit code: see
`docs/faults.md`.

Needs only the standard library until it has something to kill, so that it knows what to do with a signal from its first
moment on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import read_statuses
from spmdrl.faults.saved import newest_step
from spmdrl.faults.verdict import (
    EXIT_INTERRUPTED,
    EXIT_LOST_RANK,
    EXIT_REQUEUE,
    SUPERVISED,
    read_error,
    read_requeue,
)

REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
LOOK_S = 5.0  # between two looks at whether a rank has reported a failure
END_S = 120.0  # for the ranks to end after that: a node that is gone cannot say that its own have

FOLDER_HEADING = "# run folder"  # of the check's output; the next line names the folder


class Requests:
    """Signals to this program, in the order in which they came; each is handed to `act`, also those before it was set.

    A context: the handlers that were there before are back at its end.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._act: Callable[[signal.Signals], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Requests:
        for number in REQUESTS:
            before = signal.signal(number, self._receive)
            if before is signal.SIG_IGN:  # as under nohup
                signal.signal(number, before)
            else:
                self._before[number] = before
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if self._act is not None:
            self._act(self.received[-1])

    def hand_to(self, act: Callable[[signal.Signals], None]) -> None:
        """Hand all signals to `act`, from the first one on."""
        self._act = act
        for number in tuple(self.received):
            act(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a launch ended."""

    code: int  # for the shell
    text: str = ""  # for the user; empty when the ranks have said all there is to say
    reason: str = ""  # of a request to stop
    told: bool = False  # the request came to this program, and not to the ranks alone
    advanced: bool = False  # the launch has saved a step

    @property
    def stopped(self) -> bool:
        """True when the run was asked to stop, and the same command continues it."""
        return self.code == EXIT_REQUEUE


def launch(
    module: str, arguments: Sequence[str], *, num_ranks: int, command: Sequence[str], requests: Requests
) -> Ending:
    """Check the settings, then run the command, which starts the ranks of `module`, to its end."""
    code, folder = check(module, arguments, num_ranks=num_ranks, requests=requests)
    if requests.received:
        first = requests.received[0]
        text = f"stopped by {name_of(first)} while the settings were being checked: nothing was started"
        code = EXIT_INTERRUPTED if first == signal.SIGINT else EXIT_REQUEUE
        return Ending(code=code, text=text, reason=name_of(first), told=True)
    if code or folder is None:
        return Ending(code=code)
    files = FaultFiles(folder)
    before = newest_step(files.checkpoints)
    code = supervise(files, [*command, "-m", module, *arguments], requests)
    text, code, reason = conclude(files, code, requests.received)
    advanced = newest_step(files.checkpoints) > before
    return Ending(code=code, text=text, reason=reason, told=bool(requests.received), advanced=advanced)


def check(module: str, arguments: Sequence[str], *, num_ranks: int, requests: Requests) -> tuple[int, Path | None]:
    """Check the settings once, so that a mistake is shown once; returns the exit code and the run's folder.

    Any request ends the check.
    """
    command = [sys.executable, "-m", module, *arguments, "--dry-run", "--ranks", str(num_ranks)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    requests.hand_to(lambda _: end_at_once(process.pid))
    lines = iter(process.communicate()[0].splitlines())
    folder = next((Path(next(lines)) for line in lines if line == FOLDER_HEADING), None)
    return process.returncode, folder


def supervise(files: FaultFiles, command: Sequence[str], requests: Requests) -> int:
    """Run the command and return its exit code, which is 128 plus the signal's number if a signal ended it.

    The first request makes the run stop. Later ones are more urgent: SIGTERM is forwarded to the command, and Ctrl-C
    ends everything at once.
    """
    files.clear()
    files.stop.unlink(missing_ok=True)
    # In a session of its own, it does not receive the terminal's Ctrl-C.
    process = subprocess.Popen(command, env=os.environ | {SUPERVISED: "1"}, start_new_session=True)
    asked: list[signal.Signals] = []

    def act(number: signal.Signals) -> None:
        asked.append(number)
        if len(asked) == 1:
            files.folder.mkdir(parents=True, exist_ok=True)
            files.stop.write_text(name_of(number), encoding="utf-8")
            if number == signal.SIGINT:
                print("stopping after this phase, with a checkpoint; Ctrl-C again ends it at once", file=sys.stderr)
        elif number == signal.SIGINT:
            end_at_once(process.pid)
        elif number == signal.SIGTERM:
            process.terminate()

    requests.hand_to(act)
    code = _wait(process, files)
    return code if code >= 0 else 128 - code


def _wait(process: subprocess.Popen[bytes], files: FaultFiles) -> int:
    """Wait for the command; end it when a rank has reported a failure and it still does not end by itself."""
    failed_at: float | None = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_S)
        if failed_at is None and files.error.exists():
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > END_S:
            end_at_once(process.pid)


def conclude(files: FaultFiles, code: int, received: Sequence[signal.Signals] = ()) -> tuple[str, int, str]:
    """Return the user's message, the exit code and the reason of a stop for a run whose command ended with `code`.

    `received` are the requests that came to this program.
    """
    saved = newest_step(files.checkpoints)
    if signal.SIGINT in received[1:]:
        return f"interrupted; the same command goes on after step {saved}", EXIT_INTERRUPTED, "Ctrl-C"
    if (error := read_error(files)) is not None:
        return error.text(), error.exit_code, ""
    if (requeue := read_requeue(files)) is not None:
        return requeue.text(), EXIT_REQUEUE if requeue.again else 0, requeue.reason
    statuses = read_statuses(files)
    left = [status for status in statuses if not status.ended]
    if code and left:
        places = "; ".join(f"{status.name} was in {status.place}" for status in left[:8])
        more = f"; and {len(left) - 8} more" if len(left) > 8 else ""
        return f"the ranks ended without an error message: {places}{more}", EXIT_LOST_RANK, ""
    by_code = [number for number in REQUESTS if code == 128 + number]
    sent = next(iter([*received, *by_code]), None)
    if code and sent is not None and not statuses:
        text = (
            f"the ranks were ended by {name_of(sent)} before they had joined each other, and saved nothing; the same "
            f"command goes on after step {saved}"
        )
        return text, EXIT_REQUEUE, name_of(sent)
    return "", code, ""


def name_of(number: signal.Signals) -> str:
    """Return the name of a signal for the user."""
    return "Ctrl-C" if number == signal.SIGINT else number.name


def end_at_once(pid: int) -> None:
    """Kill a process and all that it has started."""
    import psutil  # only here: its import takes as long as all others together

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def tell(ending: Ending) -> int:
    """Print the last words of a launch; returns its exit code."""
    if ending.text:
        print(ending.text, file=sys.stderr, flush=True)
    return ending.code
