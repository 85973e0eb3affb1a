"""Guard of one agent: starts its command, and ends whatever that has started when it ends or is to end.

    python guard.py PID COMMAND...      PID is the rank's: when the rank dies, so do the command and its descendants

As a program it stands alone, so it imports nothing beyond Python. Its exit code is the command's, 128 plus the
number after a signal, and 127 when the command cannot be started. SIGTERM ends it all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CHILDREN = "/proc/thread-self/children"


def main(rank: int, command: list[str]) -> int:
    """Run the command to its end; returns its exit code."""
    # Until the command's process id is known, nothing could be ended.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal_at_parents_end(signal.SIGTERM)
    adopt_orphans()
    if os.getppid() != rank:
        return 128 + signal.SIGTERM
    child = _start(command)
    signal.signal(signal.SIGTERM, lambda *_: kill_group(child))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # Its id cannot belong to another process before `waitpid` has collected it.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_group(child)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_children()
    return code if code >= 0 else 128 - code


def _start(command: list[str]) -> int:
    """Start the command in a process group of its own; on Linux it dies with this process, however that ends."""
    child = os.fork()
    if child:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it has done so itself, or has ended
            os.setpgid(child, child)
        return child
    try:
        os.setpgid(0, 0)
        signal_at_parents_end(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def signal_at_parents_end(number: int) -> None:
    """Let Linux send this process a signal when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Let orphans of this process's descendants, also those with a session of their own, become its children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: when all in it have ended
        os.killpg(group, signal.SIGKILL)


def kill_children() -> None:
    """Kill this process's children. Those of the ones who die become ours, until there are none."""
    with contextlib.suppress(FileNotFoundError):  # the system does not list children
        while children := _children():
            for child in children:
                os.kill(child, signal.SIGKILL)
            for child in children:
                with contextlib.suppress(ChildProcessError):  # a signal came in between, and it was collected then
                    os.waitpid(child, 0)


def _children() -> list[int]:
    with open(_CHILDREN, "rb") as listed:
        return [int(child) for child in listed.read().split()]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
