"""The remains of a rollout in a sandbox, ended before the next one."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time

from spmdrl.workers.folders import empty
from spmdrl.workers.sandbox import Walls

_LIMIT_S = 2.0  # for processes that have been killed to be gone
_POLL_S = 0.001


def clear(walls: Walls) -> None:
    """End the processes that were left, and delete the files.

    Where this process still has children, these and all others live on: a reward function may keep a pool of them.
    Raises OSError where something cannot be removed; then the whole sandbox must end.
    """
    if walls.owns_processes and not _has_children():
        _end_others()
    for folder in walls.own_folders:
        if not (walls.in_memory and _is_untouched(folder)):
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
            time.sleep(_POLL_S)
