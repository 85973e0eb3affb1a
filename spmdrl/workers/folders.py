"""Temporary directories of sandboxed processes: locked while the rank lives, deleted later if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import tempfile
from collections.abc import Iterator

_PREFIX = "spmdrl-sandbox-"


class HeldFolder:
    """A new temporary directory, locked by this process; the system releases the lock when the process ends."""

    def __init__(self) -> None:
        self._held: int | None = None
        while self._held is None:  # another process's `sweep` may delete it before it is locked
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            self._held = _hold(self.path)

    def remove(self) -> None:
        """Delete the directory and its content. A second call does nothing."""
        if self._held is not None:
            _remove(self.path)
            os.close(self._held)
            self._held = None


def sweep() -> None:
    """Delete this user's directories that no process has locked: their owners were killed."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry for entry in entries if entry.name.startswith(_PREFIX)]
    for entry in found:
        with contextlib.suppress(OSError):  # another process may sweep at the same time
            is_ours = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if is_ours and (held := _hold(entry.path)) is not None:
                _remove(entry.path)
                os.close(held)


def empty(path: str) -> None:
    """Delete all that is in a directory, however deep, and whatever rights its owner has left on it.

    Directories come up to the top before they are deleted, so that no path becomes too long. Raises OSError.
    """
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        os.fchmod(top, 0o700)
        numbers = itertools.count()
        while entries := list(os.scandir(top)):
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _raise_folders(entry.name, top, numbers)
                    os.rmdir(entry.name, dir_fd=top)
                else:
                    os.unlink(entry.name, dir_fd=top)
    finally:
        os.close(top)


def _raise_folders(name: str, top: int, numbers: Iterator[int]) -> None:
    """Delete the files of a directory in `top`, and move its directories there."""
    os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.name, 0o700, dir_fd=folder)
                raised = next(number for number in numbers if not _exists(str(number), top))
                os.rename(entry.name, str(raised), src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(entry.name, dir_fd=folder)
    finally:
        os.close(folder)


def _exists(name: str, folder: int) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(
        OSError
    ):  # another user's files, or processes that no sandbox holds and that go on writing
        empty(path)
        os.rmdir(path)


def _hold(path: str) -> int | None:
    """Lock a directory; None if another process has locked it, or has just deleted it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.isdir(path):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
