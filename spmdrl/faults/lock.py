"""The lock of a run's folder: one launch owns it, and a second one is told who does.

The kernel's lock on RUN/lock ends with the process that holds it. A shared file system may not carry it to other hosts,
so the owner also renews the file's time: while that moves, the owner on another host is alive. Needs only the standard
library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spmdrl.faults.files import read_fields
from spmdrl.faults.rank_status import own_host, process_state

RENEW_S = 5.0  # between two renewals of the file's time
MISSED = 3  # an owner on another host that has missed this many renewals is dead


class FolderInUse(Exception):
    """Another process owns the folder; the text says which, and what to do."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns a run's folder, as its lock file names it."""

    host: str
    pid: int
    since: str

    @property
    def is_elsewhere(self) -> bool:
        """True when its host is not this one, which knows nothing about its processes."""
        return self.host != own_host()


@contextlib.contextmanager
def owned(folder: Path, *, renew_s: float = RENEW_S) -> Iterator[None]:
    """Own a run's folder inside the block. Raises FolderInUse when another process does; nothing has changed then."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lock"
    with path.open("a", encoding="utf-8") as file:
        _take(file, path, renew_s=renew_s)
        file.truncate(0)
        file.write(json.dumps(dataclasses.asdict(Owner(own_host(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")))))
        file.flush()
        over = threading.Event()
        renewal = threading.Thread(target=_renew, args=(file, over, renew_s), name="lock", daemon=True)
        renewal.start()
        try:
            yield
        finally:
            over.set()
            renewal.join()
            with contextlib.suppress(OSError):
                file.truncate(0)  # nobody has to wait for an owner that has said that it is gone


def _take(file: IO[str], path: Path, *, renew_s: float) -> None:
    """Take the kernel's lock, and make sure that no other host has an owner that this lock does not show."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        can_lock = True
    except BlockingIOError:
        raise FolderInUse(_sentence(path, _read(path))) from None
    except OSError:  # the file system has no locks
        can_lock = False
    owner = _read(path)
    if owner is None:
        return
    is_alive = _renews(path, renew_s) if owner.is_elsewhere else not can_lock and process_state(owner.pid) is not None
    if is_alive:
        raise FolderInUse(_sentence(path, owner))


def _read(path: Path) -> Owner | None:
    fields = read_fields(path, {field.name: str(field.type) for field in dataclasses.fields(Owner)})
    return None if fields is None else Owner(**fields)


def _renews(path: Path, renew_s: float) -> bool:
    """Return True as soon as the file's time moves: clocks of hosts differ, so its age says nothing."""
    before = path.stat().st_mtime_ns
    until = time.monotonic() + MISSED * renew_s
    while time.monotonic() < until:
        time.sleep(renew_s / 5)
        if path.stat().st_mtime_ns != before:
            return True
    return False


def _renew(file: IO[str], over: threading.Event, renew_s: float) -> None:
    while not over.wait(renew_s):
        with contextlib.suppress(OSError):  # the storage is away for a while
            os.utime(file.fileno())


def _sentence(path: Path, owner: Owner | None) -> str:
    name = f"process {owner.pid} on {owner.host}, since {owner.since}" if owner else "a process that does not say which"
    return (
        f"the run folder {path.parent} is in use by {name}; wait for it, stop it (touch {path.parent}/stop), or set "
        "run.name to a new name"
    )
