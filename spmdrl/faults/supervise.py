"""Check a run, start its ranks, pass on requests to stop, and report how it ended.

A run starts through this: by `tools/local.py` on one machine, by `slurm.py` on the nodes of a job. Requests to stop
become the file RUN/stop, which the ranks of all nodes see: the program that starts the ranks would end them after a
while. The verdict that a rank has left in the run's folder is printed last and decides the exit code: see
`docs/faults.md`.

Needs only the standard library until it has something to kill, so that it knows what to do with a signal from its first
moment on. What imports torch is a process of its own: `Commands` starts others, `forked.py` forks.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Protocol

from spmdrl.faults.files import FaultFiles, replace_text
from spmdrl.faults.guard import signal_at_parents_end
from spmdrl.faults.lock import FolderInUse, owned
from spmdrl.faults.rank_status import read_statuses
from spmdrl.faults.text import say
from spmdrl.faults.verdict import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_LOST_RANK,
    EXIT_REQUEUE,
    EXIT_USER_ERROR,
    SUPERVISED,
    read_error,
    read_requeue,
)

# The GPUs of this machine, counted without torch, which takes seconds to import.


def count_gpus() -> int:
    """Return the number of GPUs that processes of this machine may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return 0 if visible.startswith("-1") or not visible else len(visible.split(","))
    return gpus_of_driver()


def gpus_of_driver() -> int:
    """Return the number of GPUs that the driver shows, 0 without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    shown = subprocess.run(["nvidia-smi", "--list-gpus"], check=False, capture_output=True, text=True).stdout
    return len(re.findall("^GPU", shown, re.MULTILINE))


# Which steps a run has saved, by the names of its checkpoints. Needs only the standard library.
#
# `step-00000012` is complete: it got that name last. Any other name is of one that is not.


_NAME = re.compile(r"step-(\d{8,})")


def step_of(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's name; None if the checkpoint is not finished, or the name is not one.

    Only the name counts: a dangling link is a checkpoint that cannot be loaded, not a missing checkpoint.
    """
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of all finished checkpoints, oldest first."""
    steps = (step_of(path) for path in folder.glob("step-*"))
    return sorted(step for step in steps if step is not None)


def newest_step(folder: Path) -> int:
    """Return the step of the newest finished checkpoint, 0 when there is none."""
    return max(saved_steps(folder), default=0)


REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
POLL_S = 0.05  # between two polls of a process, and of the requests
LOOK_S = 5.0  # between two polls for a failure that a rank has reported
END_S = 120.0  # for the ranks to end after that: a node that is gone cannot say that its own have

FOLDER_HEADING = "# run folder"  # of the check's output; the next line names the folder


class Requests:
    """Signals to this program, in the order in which they came.

    A context: the handlers that were there before are back at its end.
    """

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
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

    def during(self, process: Process) -> Iterator[list[signal.Signals]]:
        """Yield those that have not been yielded yet, many times a second, until the process has ended."""
        seen = 0
        while process.poll() is None:
            new = self.received[seen:]
            seen += len(new)
            yield new
            time.sleep(POLL_S)


class Process(Protocol):
    """A process in a session of its own, so that it does not receive the terminal's Ctrl-C. `subprocess` has such."""

    @property
    def pid(self) -> int:
        """Its number; what it starts descends from it."""
        ...

    def poll(self) -> int | None:
        """Return its exit code, negative if a signal has ended it; None while it runs."""
        ...

    def terminate(self) -> None: ...


class Starter(Protocol):
    """Starts the processes of a launch, the second one after the first."""

    def check(self, output: IO[str]) -> Process:
        """Start the dry run, with its standard output in a file."""
        ...

    def ranks(self) -> Process:
        """Start what the ranks run under. They find `SUPERVISED` in their environment."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """Starts them by commands: the check by Python, the ranks by `command`, which gets `-m` and the module."""

    module: str
    arguments: Sequence[str]
    num_ranks: int
    command: Sequence[str]

    def check(self, output: IO[str]) -> Process:
        """Start the dry run; see `Starter`."""
        command = [sys.executable, "-m", self.module, *dry_run(self.arguments, self.num_ranks)]
        return subprocess.Popen(command, stdout=output, start_new_session=True)

    def ranks(self) -> Process:
        """Start the command; see `Starter`."""
        command = [*self.command, "-m", self.module, *self.arguments]
        return subprocess.Popen(command, env=os.environ | {SUPERVISED: "1"}, start_new_session=True)


def dry_run(arguments: Sequence[str], num_ranks: int) -> list[str]:
    """Return the arguments with which the program of a rank checks its settings, and starts nothing."""
    return [*arguments, "--dry-run", "--ranks", str(num_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a launch ended."""

    code: int  # for the shell
    text: str = ""  # for the user; empty when the ranks have reported all there is
    reason: str = ""  # of a request to stop
    requested: bool = False  # the request came to this program, and not to the ranks alone
    advanced: bool = False  # the launch has saved a step

    @property
    def stopped(self) -> bool:
        """True when the run was asked to stop, and the same command continues it."""
        return self.code == EXIT_REQUEUE


def launch(starter: Starter, requests: Requests) -> Ending:
    """Check the settings, then run the ranks to their end."""
    code, folder = check(starter, requests)
    if requests.received:
        first = requests.received[0]
        text = f"stopped by {name_of(first)} while the settings were being checked: nothing was started"
        code = EXIT_INTERRUPTED if first == signal.SIGINT else EXIT_REQUEUE
        return Ending(code=code, text=text, reason=name_of(first), requested=True)
    if code or folder is None:
        return Ending(code=code)
    try:
        with owned(folder):
            return _run(FaultFiles(folder), starter, requests)
    except FolderInUse as error:
        return Ending(code=EXIT_USER_ERROR, text=f"cannot start: {error}")


def _run(files: FaultFiles, starter: Starter, requests: Requests) -> Ending:
    """Run the ranks to their end in a folder that this process owns."""
    before = newest_step(files.checkpoints)
    code = supervise(files, starter, requests)
    text, code, reason = conclude(files, code, requests.received)
    advanced = newest_step(files.checkpoints) > before
    return Ending(code=code, text=text, reason=reason, requested=bool(requests.received), advanced=advanced)


def check(starter: Starter, requests: Requests) -> tuple[int, Path | None]:
    """Check the settings once, so that a mistake is shown once; returns the exit code and the run's folder.

    Any request ends the check.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = starter.check(output)
        for new in requests.during(process):
            if new:
                end_at_once(process.pid)
        output.seek(0)
        lines = iter(output.read().splitlines())
    folder = next((Path(next(lines)) for line in lines if line == FOLDER_HEADING), None)
    return shell_code(process), folder


def supervise(files: FaultFiles, starter: Starter, requests: Requests) -> int:
    """Run the ranks and return the exit code of what they run under, as a shell shows it.

    The first request makes the run stop. Later ones are more urgent: SIGTERM is forwarded, and Ctrl-C ends everything
    at once. So does a failure that a rank has reported, if the others outlive it.
    """
    files.clear()
    files.stop.unlink(missing_ok=True)
    process = starter.ranks()
    patience = Patience(files)
    asked = False
    for new in requests.during(process):
        for number in new:
            if not asked:
                ask_to_stop(files, number)
            elif number == signal.SIGINT:
                end_at_once(process.pid)
            elif number == signal.SIGTERM:
                process.terminate()
            asked = True
        if patience.is_over():
            end_at_once(process.pid)
    return shell_code(process)


class Patience:
    """With ranks that do not end by themselves although one of them has reported a failure."""

    def __init__(self, files: FaultFiles) -> None:
        self._files = files
        self._next_check = time.monotonic() + LOOK_S
        self._ends_at = math.inf

    def is_over(self) -> bool:
        """Return True once they have had their time to end; reads the report now and then."""
        now = time.monotonic()
        if now > self._next_check:
            self._next_check = now + LOOK_S
            if self._ends_at == math.inf and self._files.error.exists():
                self._ends_at = now + END_S
        return now > self._ends_at


def ask_to_stop(files: FaultFiles, number: signal.Signals) -> None:
    """Make the run stop at its next edge between two phases."""
    files.path.mkdir(parents=True, exist_ok=True)
    replace_text(files.stop, name_of(number))  # ranks read its reason as soon as it is there
    if number == signal.SIGINT:
        say("stopping after this phase, with a checkpoint; Ctrl-C again ends it at once", sys.stderr)


def shell_code(process: Process) -> int:
    """Return the exit code of a process that has ended, as a shell shows it: 128 plus the number of a signal."""
    code = process.poll()
    assert code is not None, "it has ended"
    return code if code >= 0 else 128 - code


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
    if code and left and (why := _unwritable(files.path)):
        text = (
            f"the ranks ended, and nothing can be written to {files.path}: {why}; make room, and the same command "
            f"goes on after step {saved}"
        )
        return text, EXIT_USER_ERROR, ""
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


def _unwritable(folder: Path) -> str:
    """Return why nothing can be written here, or nothing if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


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


def die_with_parent() -> None:
    """Let Linux kill this process when the one that started it ends, however that ends: no orphan trains on."""
    signal_at_parents_end(signal.SIGKILL)
    starter = multiprocessing.parent_process()
    if starter is not None and os.getppid() != starter.pid:  # it has ended before Linux was asked
        os.kill(os.getpid(), signal.SIGKILL)


def tell(ending: Ending) -> int:
    """Print the last words of a launch; returns its exit code."""
    if ending.code in (EXIT_INTERRUPTED, EXIT_LOST_RANK, EXIT_HANG) and sys.stdout.isatty():
        with contextlib.suppress(OSError):  # the rank that hid the cursor for its display may have been killed
            sys.stdout.write("\x1b[?25h\n")
            sys.stdout.flush()
    if ending.text:
        say(ending.text, sys.stderr)
    return ending.code
