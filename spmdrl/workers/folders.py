"""Directories that are locked while their processes live, and deleted later if these were killed.

Those of sandboxed processes have one owner; others are shared by all processes of a run on one machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import tempfile
import time
from collections.abc import Iterator

_PREFIX = "spmdrl-sandbox-"


class LockedFolder:
    """A new temporary directory, locked by this process; the system releases the lock when the process ends."""

    def __init__(self) -> None:
        self._lock: int | None = None
        while self._lock is None:  # another process's `sweep` may delete it before it is locked
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            self._lock = _lock_folder(self.path)

    def remove(self) -> None:
        """Delete the directory and its content. A second call does nothing."""
        if self._lock is not None:
            _remove(self.path)
            os.close(self._lock)
            self._lock = None


class SharedFolder:
    """A directory that processes of one user share: the first makes it, the last one to close it deletes it."""

    def __init__(self, path: str) -> None:
        """Raises PermissionError when another user has put something there."""
        self.path = path
        self._lock: int | None = None
        while self._lock is None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            self._lock = _lock_folder(path, fcntl.LOCK_SH)
            if self._lock is None:  # another process is deleting it
                time.sleep(0.01)
        status = os.fstat(self._lock)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "it belongs to another user, or is open to others; remove it", path)

    def close(self) -> None:
        """Delete the directory and its content, unless another process uses it. A second call does nothing."""
        if self._lock is None:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(self._lock, self.path):
                _remove(self.path)
        os.close(self._lock)
        self._lock = None


def sweep(parent: str | None = None, prefix: str = _PREFIX) -> None:
    """Delete this user's directories that no process has locked: their owners were killed.

    Without a parent, those in the directory for temporary files.
    """
    with os.scandir(parent or tempfile.gettempdir()) as entries:
        found = [entry for entry in entries if entry.name.startswith(prefix)]
    for entry in found:
        with contextlib.suppress(OSError):  # another process may sweep at the same time
            is_ours = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if is_ours and (lock := _lock_folder(entry.path)) is not None:
                _remove(entry.path)
                os.close(lock)


def empty(path: str) -> None:
    """Delete all that is in a directory, however deep, and whatever rights its owner has left on it.

    Directories come up to the top before they are deleted, so that no path becomes too long. Raises OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        top = os.open(path, flags)
    except PermissionError:
        os.chmod(path, 0o700)
        top = os.open(path, flags)
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
    ):  # another user's files, or processes that no sandbox holds and that continue writing
        empty(path)
        os.rmdir(path)


def _lock_folder(path: str, kind: int = fcntl.LOCK_EX) -> int | None:
    """Lock a directory, for this process alone or for all that share it; None if another process has locked it
    otherwise, or has just deleted it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        if _is_at(descriptor, path):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: str) -> bool:
    """Return True where the path still names the open directory: it may have been deleted, and made again."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
