"""Python programs that the policy wrote, each in a process of its own. The process that starts them is confined."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from spmdrl.workers.folders import empty
from spmdrl.workers.sandbox import Isolation

# The remains of a rollout in a sandbox, ended before the next one.


_LIMIT_S = 2.0  # for processes that have been killed to be gone
_CLEANUP_POLL_S = 0.001


def clear(isolation: Isolation) -> None:
    """End the processes that were left, and delete the files.

    Where this process still has children, these and all others live on: a reward function may keep a pool of them.
    Raises OSError where something cannot be removed; then the whole sandbox must end.
    """
    if isolation.owns_processes and not _has_children():
        _end_others()
    for folder in isolation.own_folders:
        if not (isolation.in_memory and _is_untouched(folder)):
            empty(folder)


def _is_untouched(folder: str) -> bool:
    """True when a file system in memory has nothing but its top, with the rights that it had at first."""
    there = os.statvfs(folder)
    return there.f_files - there.f_ffree == 1 and stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def _has_children() -> bool:
    """Collect children that have ended; True when others live."""
    with contextlib.suppress(ChildProcessError):  # there are none
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def _end_others() -> None:
    """Kill all processes of the namespace but the first and this one, at once, and wait until they are gone."""
    assert os.getppid() == 1, "only in a namespace of its own can a process kill all others"
    deadline = time.monotonic() + _LIMIT_S
    with contextlib.suppress(ProcessLookupError):  # there are no others
        while True:
            os.kill(-1, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError("processes that were killed have not ended")
            time.sleep(_CLEANUP_POLL_S)


_MAX_OUTPUT_BYTES = 2**20
_POLL_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """The end of one program."""

    output: str  # at most 1 MiB of what it wrote
    is_cut: bool  # it wrote more than that
    exit_code: int | None  # negative: the number of a signal; None: it was killed at the deadline


def run_program(program: str, given: str, deadline: float, *, with_errors: bool) -> ProgramEnd:
    """Run a program on the input `given` until a `deadline` of `time.monotonic`, then kill what it has started.

    The output is that of standard output, and `with_errors` that of standard error in between. Tracebacks name the
    program's file without its folder, whose random name would make the same program write something else each time.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
        (folder / "input").write_text(given, encoding="utf-8", errors="surrogatepass")
        with (folder / "input").open("rb") as source, (folder / "output").open("w+b") as sink:
            process = subprocess.Popen(
                [sys.executable, "-I", "program.py"],
                cwd=folder,
                env=os.environ | {"HOME": name, "TMPDIR": name},
                stdin=source,
                stdout=sink,
                stderr=subprocess.STDOUT if with_errors else subprocess.DEVNULL,
                start_new_session=True,
            )
            has_ended = _wait(process.pid, deadline)
            os.killpg(process.pid, signal.SIGKILL)  # before `wait`, while its id cannot belong to another process
            code = process.wait()
            sink.seek(0)
            written = sink.read(_MAX_OUTPUT_BYTES + 1)
        place = f'File "{folder.resolve()}/'
    return ProgramEnd(
        output=written[:_MAX_OUTPUT_BYTES].decode(errors="replace").replace(place, 'File "'),
        is_cut=len(written) > _MAX_OUTPUT_BYTES,
        exit_code=code if has_ended else None,
    )


def _wait(pid: int, deadline: float) -> bool:
    """Wait until a child has ended, without collecting it, or until the deadline; False for the latter."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
