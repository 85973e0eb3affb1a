"""Temporary directories of sandboxed processes: locked while the rank lives, deleted later if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile

_PREFIX = "spmdrl-sandbox-"


class HeldFolder:
    """A new temporary directory, locked by this process; the system releases the lock when the process ends."""

    def __init__(self) -> None:
        self._held: int | None = None
        while self._held is None:  # another process's `sweep` may delete it before it is locked
            self.path = tempfile.mkdtemp(prefix=_PREFIX)
            self._held = _hold(self.path, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Delete the directory and its content. A second call does nothing."""
        if self._held is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = None


def sweep() -> None:
    """Delete this user's directories that no process has locked: their owners were killed."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry for entry in entries if entry.name.startswith(_PREFIX)]
    for entry in found:
        with contextlib.suppress(OSError):  # another process may sweep at the same time
            is_ours = entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid()
            if is_ours and (held := _hold(entry.path, fcntl.LOCK_EX | fcntl.LOCK_NB)) is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(held)


def _hold(path: str, operation: int) -> int | None:
    """Lock a directory; None if another process has locked it, or has just deleted it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, operation)
        if os.path.isdir(path):
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None
