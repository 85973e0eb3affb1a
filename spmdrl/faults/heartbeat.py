"""One rank's heartbeat: the status file and the log that it writes for the other ranks, and what it reads of theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import Any

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import RankStatus, has_ended, own_host, read_statuses
from spmdrl.faults.text import printable
from spmdrl.faults.verdict import ErrorReport, read_error

BEAT_S = 5.0  # between two beats when nothing changes; shared storage must bear one from every rank
BEATS_MISSED = 3  # a rank that has missed this many is not responding


class Heartbeat:
    """This rank's status and log on disk, and its view of the other ranks.

    The main thread replaces `status` and the watch's thread counts beats, so that neither waits for the other.
    """

    def __init__(self, files: FaultFiles, *, launch: str, rank: int, num_ranks: int, beat_s: float = BEAT_S) -> None:
        """`launch` is the same on all ranks and differs between launches."""
        self.files, self.beat_s = files, beat_s
        self.status = RankStatus(
            launch=launch,
            rank=rank,
            num_ranks=num_ranks,
            host=own_host(),
            pid=os.getpid(),
            step=0,
            phase="start",
            phases_entered=0,
            moved_at=time.time(),
        )
        self._num_beats = 0
        files.log_of(rank).parent.mkdir(parents=True, exist_ok=True)
        files.statuses.mkdir(parents=True, exist_ok=True)
        self.log = files.log_of(rank).open("a", encoding="utf-8", errors="backslashreplace", buffering=1)

    def update(self, **changes: Any) -> None:
        """Change fields of `status`; the watch's thread writes it to disk."""
        self.status = dataclasses.replace(self.status, **changes)

    def note(self, text: str) -> None:
        """Write to the rank's log."""
        with contextlib.suppress(OSError):  # a full disk has more important victims
            self.log.write(f"{time.strftime('%H:%M:%S')} {printable(text)}\n")

    def write(self) -> None:
        """Write the status file."""
        with contextlib.suppress(OSError):
            dataclasses.replace(self.status, beat=self._num_beats).write(self.files)

    def beat(self) -> None:
        """Show the other ranks that this one is alive."""
        self._num_beats += 1
        self.write()

    def beat_for(self, seconds: float) -> None:
        """Wait, beating all the while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.beat()
            time.sleep(min(self.beat_s, max(0.0, deadline - time.monotonic())))

    def all_ranks(self) -> list[RankStatus]:
        """Read the status of every rank of this launch."""
        return read_statuses(self.files, launch=self.status.launch)

    def other_ranks(self) -> list[RankStatus]:
        """Read the status of every other rank of this launch."""
        return [status for status in self.all_ranks() if status.rank != self.status.rank]

    def error(self) -> ErrorReport | None:
        """Read the cause of this launch's failure, if a rank has reported one."""
        return read_error(self.files, launch=self.status.launch)

    def rank_failed(self) -> bool:
        """True when a rank has reported a failure other than a hang."""
        report = self.error()
        return report is not None and report.kind != "hang"

    def job_is_ending(self) -> bool:
        """True when a rank has failed, or another rank of this host is gone."""
        return self.rank_failed() or any(has_ended(status, self.status.host) for status in self.other_ranks())
