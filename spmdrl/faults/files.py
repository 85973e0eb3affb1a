"""Files in a run's folder that tell the state of its ranks, and how it ended. Needs only the standard library.

error.json          the cause of a failure, written once, by the first rank that fails
requeue             the run stopped on request, has saved, and can be started again
stop                create this file to stop the run; the run removes it
ranks/rank-N.json   the step and phase of each rank
logs/rank-N.log     the log of each rank: steps, secondary errors, stacks
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAST_LINES = 20
LAST_BYTES = 16384  # the part of a log that `last_lines` reads


_TYPES: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool, "list[str]": list, "Kind": str}


class PathIn:
    """A file or a folder, by its name in the folder that is the `path` of an object."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, kind: type) -> Path:
        path: Path = owner.path / self._name
        return path


@dataclass(frozen=True, slots=True)
class FaultFiles:
    """The paths of one run's fault files."""

    path: Path
    error = PathIn("error.json")
    """The cause of a failure, a `verdict.ErrorReport`."""
    requeue = PathIn("requeue")
    """The request to start the run again, a `verdict.Requeue`."""
    stop = PathIn("stop")
    """The file that stops the run; its content is shown as the reason."""
    checkpoints = PathIn("checkpoints")
    """The directory of checkpoints; see `saved`."""
    statuses = PathIn("ranks")
    """The directory of status files, a `rank_status.RankStatus` each."""

    def status_of(self, rank: int) -> Path:
        return self.statuses / f"rank-{rank}.json"

    def log_of(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    def flight_record_of(self, rank: int) -> Path:
        """Torch's record of one rank's last collectives; written after a hang."""
        return self.path / "logs" / f"rank-{rank}.flight.json"

    def clear(self) -> None:
        """Remove the verdict and the status files of an earlier launch."""
        for path in (self.error, self.requeue, *self.statuses.glob("rank-*.json")):
            path.unlink(missing_ok=True)

    def last_lines(self, rank: int) -> list[str]:
        """Read the last lines of a rank's log."""
        try:
            with open_ordinary(self.log_of(rank)) as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LAST_BYTES))
                return log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        except OSError:
            return []


def open_ordinary(path: Path) -> io.BufferedReader:
    """Open an ordinary file to read its bytes. Raises OSError, at once for a pipe, which would be waited for."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115  returned
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is a pipe or a device")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read the object in a file; None when the file is missing or incomplete."""
    try:
        with open_ordinary(path) as file:
            content = json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_fields(path: Path, types: Mapping[str, str]) -> dict[str, Any] | None:
    """Read an object whose keys are these, with values of these types; None when it is another.

    A type is the name of one of Python's, such as "int"; other annotations allow every value.
    """
    content = read_json(path)
    if content is None or content.keys() != types.keys():
        return None
    right = all(isinstance(content[name], _TYPES.get(kind, object)) for name, kind in types.items())
    return content if right else None


def replace_json(path: Path, content: Any) -> None:
    """Write a value as `replace_text` writes a text."""
    replace_text(path, json.dumps(content))


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader finds the old text or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
