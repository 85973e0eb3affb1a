"""The lock of a run's folder: one launch owns it, and a second one learns which.

Each launch creates RUN/launches/N.json, which fails when another one has created it: also between the hosts of a shared
file system, and also for two launches of one moment. The newest of these files names the owner. The kernel's lock on it
ends with the process that holds it. A shared file system may not carry such locks to other hosts, so the owner also
renews the file's time: while that moves, it is alive. Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spmdrl.faults.files import read_fields
from spmdrl.faults.rank_status import own_host, process_state
from spmdrl.faults.text import say

FOLDER = "launches"
RENEW_S = 5.0  # between two renewals of the file's time
MISSED = 3  # an owner on another host that has missed this many renewals is dead


class FolderInUse(Exception):
    """Another process owns the folder; the text says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns a run's folder, or owned it until it ended, as its file names it."""

    host: str
    pid: int
    since: str
    ended: str = ""

    @property
    def is_elsewhere(self) -> bool:
        """True when its host is not this one, which knows nothing about its processes."""
        return self.host != own_host()

    def write(self, file: IO[str]) -> None:
        """Replace the file's content."""
        file.seek(0)
        file.truncate()
        file.write(json.dumps(dataclasses.asdict(self)))
        file.flush()


@contextlib.contextmanager
def owned(folder: Path, *, instead: str = "", renew_s: float = RENEW_S) -> Iterator[None]:
    """Own a run's folder inside the block. Raises FolderInUse when another process does; nothing has changed then.

    `instead` is what the user can do besides waiting; by default, to stop the other one or to choose another name.
    """
    launches = folder / FOLDER
    launches.mkdir(parents=True, exist_ok=True)
    number = _newest(launches)
    while True:
        before, path = (launches / f"{one}.json" for one in (number, number + 1))
        if number and (problem := _in_use(before, renew_s)):
            raise _refusal(folder, problem, instead)
        try:
            file = path.open("x", encoding="utf-8")
            break
        except FileExistsError:  # another launch was faster
            number += 1
    with file:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # at most the moment in which another launch tries it
        owner = Owner(own_host(), os.getpid(), _now())
        owner.write(file)
        over = threading.Event()
        next_launch = launches / f"{number + 2}.json"
        renewal = threading.Thread(target=_renew, args=(file, next_launch, over, renew_s), name="lock", daemon=True)
        renewal.start()
        try:
            yield
        finally:
            over.set()
            renewal.join()
            with contextlib.suppress(OSError):
                dataclasses.replace(owner, ended=_now()).write(file)


def require_unowned(folder: Path) -> None:
    """Raise the FolderInUse of `owned` before anything has been done to own it, for what shows without waiting."""
    if problem := owner_of(folder, renew_s=0.0):
        raise _refusal(folder, problem)


def _refusal(folder: Path, problem: str, instead: str = "") -> FolderInUse:
    instead = instead or f"stop it (touch {folder}/stop), or set run.name to a new name"
    return FolderInUse(f"the run folder {folder} is in use by {problem}; wait for it, {instead}")


def owner_of(folder: Path, *, renew_s: float = RENEW_S) -> str:
    """Return the name of the launch that owns a run's folder, nothing where none does; changes nothing.

    An owner on another host that has not reported its end is waited for, up to `MISSED` renewals.
    """
    try:
        number = _newest(folder / FOLDER)
        return _in_use(folder / FOLDER / f"{number}.json", renew_s) if number else ""
    except OSError:
        return ""


def _newest(launches: Path) -> int:
    return max((int(path.stem) for path in launches.glob("*.json") if path.stem.isdecimal()), default=0)


def _in_use(path: Path, renew_s: float) -> str:
    """Return the name of a launch that is alive, else nothing."""
    owner = _read(path)
    if owner is not None and owner.ended:
        return ""
    is_locked = _is_locked(path)
    if is_locked is None and owner is not None and not owner.is_elsewhere:
        is_locked = process_state(owner.pid) is not None
    if not is_locked and (owner is None or owner.is_elsewhere):
        is_locked = _renews(path, renew_s)
    owner = _read(path)
    if not is_locked or (owner is not None and owner.ended):
        return ""
    return f"process {owner.pid} on {owner.host}, since {owner.since}" if owner else "a launch that has just begun"


def _read(path: Path) -> Owner | None:
    fields = read_fields(path, {field.name: str(field.type) for field in dataclasses.fields(Owner)})
    return None if fields is None else Owner(**fields)


def _is_locked(path: Path) -> bool | None:
    """True when a process holds the kernel's lock, as far as this host knows; None where there are no locks."""
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return None
    return False


def _renews(path: Path, renew_s: float) -> bool:
    """Return True as soon as the file's time moves: clocks of hosts differ, so its age says nothing."""
    before = _time_of(path)
    until = time.monotonic() + MISSED * renew_s
    while time.monotonic() < until:
        time.sleep(renew_s / 5)
        if _time_of(path) != before:
            return True
    return False


def _time_of(path: Path) -> int:
    with path.open(encoding="utf-8") as file:  # opening asks the server; the path alone may be cached for a minute
        return os.fstat(file.fileno()).st_mtime_ns


def _renew(file: IO[str], next_launch: Path, over: threading.Event, renew_s: float) -> None:
    while not over.wait(renew_s):
        with contextlib.suppress(OSError):  # the storage is away for a while
            os.utime(file.fileno())
        if next_launch.exists():  # this process was stopped or cut off for so long that it seemed dead
            with contextlib.suppress(OSError):
                say(f"ended at once: {next_launch} says that another launch owns the folder now", sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
