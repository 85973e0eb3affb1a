"""Where in a run's folder the ranks say how they are, and how the run ended. Needs nothing but Python.

error.json          the cause of a failure, written once, by the first rank that knows it
requeue             the run was told to stop, has saved, and wants to be started again
stop                whoever makes this file asks the run to stop; the run removes it
ranks/rank-N.json   where each rank is
logs/rank-N.log     what each rank has to say beside the console: steps, secondary errors, stacks
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAST_LINES = 20
LAST_BYTES = 16384  # of a log, in which those lines are looked for


@dataclass(frozen=True, slots=True)
class FaultFiles:
    """Those of one run."""

    folder: Path

    @property
    def error(self) -> Path:
        """See `verdict.ErrorReport`."""
        return self.folder / "error.json"

    @property
    def requeue(self) -> Path:
        """See `verdict.Requeue`."""
        return self.folder / "requeue"

    @property
    def stop(self) -> Path:
        """Asks the run to stop; what is written in it is given as the reason."""
        return self.folder / "stop"

    @property
    def posts(self) -> Path:
        """See `posts.RankStatus`."""
        return self.folder / "ranks"

    def post_of(self, rank: int) -> Path:
        """Where one rank is."""
        return self.posts / f"rank-{rank}.json"

    def log_of(self, rank: int) -> Path:
        """What one rank has to say."""
        return self.folder / "logs" / f"rank-{rank}.log"

    def flight_record_of(self, rank: int) -> Path:
        """The last collectives of one rank, as torch recorded them; after a hang."""
        return self.folder / "logs" / f"rank-{rank}.flight.json"

    def clear(self) -> None:
        """Remove what an earlier launch has left: how it ended, and where its ranks were."""
        for path in (self.error, self.requeue, *self.posts.glob("rank-*.json")):
            path.unlink(missing_ok=True)

    def last_lines(self, rank: int) -> list[str]:
        """The end of a rank's log."""
        try:
            with self.log_of(rank).open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LAST_BYTES))
                return log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        except OSError:
            return []


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None when there is no file, or not all of it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def replace_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object so that who reads the file finds the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(content), encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
