"""The status of every rank, in files that all ranks can read: they outlive a rank, and the host of torch's store.

Needs only the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.faults.files import FaultFiles, read_fields, replace_json
from spmdrl.faults.text import one_line, printable
from spmdrl.faults.verdict import ErrorReport, read_error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The status of one rank, a few seconds old at most."""

    launch: str  # the same on all ranks, and different for every launch
    rank: int
    num_ranks: int
    host: str
    pid: int
    step: int
    phase: str
    phases_entered: int  # since the launch
    moved_at: float  # unix time: when it entered the phase, or last made progress in it
    beat: int = 0  # grows as long as the rank's watch runs
    ended: bool = False  # it has left the loop, and reported it

    @property
    def place(self) -> str:
        """Step and phase, for messages."""
        return one_line(f"step {self.step}, {self.phase}" if self.step else self.phase)

    @property
    def name(self) -> str:
        """Rank, host and process, for messages."""
        return one_line(f"rank {self.rank} ({self.host}, pid {self.pid})")

    def write(self, files: FaultFiles) -> None:
        """Write it to the rank's status file."""
        replace_json(files.status_of(self.rank), dataclasses.asdict(self))


def read_statuses(files: FaultFiles, *, launch: str | None = None) -> list[RankStatus]:
    """Read the status of every rank of a launch, or of any launch, in the order of ranks."""
    types = {field.name: str(field.type) for field in dataclasses.fields(RankStatus)}
    found = [read_fields(path, types) for path in files.statuses.glob("rank-*.json")]
    statuses = [RankStatus(**content) for content in found if content is not None]
    return sorted((one for one in statuses if launch in (None, one.launch)), key=lambda one: one.rank)


def process_state(pid: int) -> str | None:
    """Return the state letter that `ps` shows for a process of this host, such as T for stopped; None if it is gone."""
    try:
        # The state follows the name, which is in brackets and may hold anything.
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return None
    return None if state in "ZX" else state


def has_ended(status: RankStatus, host: str) -> bool:
    """True for a rank of this host that is gone without a report; nothing is known about other hosts."""
    return not status.ended and status.host == host and process_state(status.pid) is None


def stuck(statuses: Sequence[RankStatus], *, now: float, timeout_s: float) -> bool:
    """True when no rank that is still in the loop has made progress for `timeout_s`."""
    running = [status for status in statuses if not status.ended]
    return bool(running) and all(now - status.moved_at > timeout_s for status in running)


def silent(before: Sequence[RankStatus], after: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that sent no beat between two readings: stopped, gone, or unable to run Python."""
    beats = {status.rank: status.beat for status in before}
    return [status for status in after if not status.ended and beats.get(status.rank) == status.beat]


def furthest_behind(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """Return the ranks that have entered the fewest phases of the earliest step; empty when all are equally far."""
    running = [status for status in statuses if not status.ended]
    progress = {status.rank: (status.step, status.phases_entered) for status in running}
    if len(set(progress.values())) < 2:
        return []
    return [status for status in running if progress[status.rank] == min(progress.values())]


def describe_hang(statuses: Sequence[RankStatus], silent_ranks: Collection[int], *, timeout_s: float) -> str:
    """Describe in one sentence which ranks the others are waiting for, and in which phase."""
    stopped = [status for status in statuses if status.rank in silent_ranks]
    behind = furthest_behind(statuses)
    start = f"no rank has made progress for {timeout_s:g} s: "
    if stopped:
        return start + "; ".join(f"{status.name} is not responding, in {status.place}" for status in stopped)
    if behind:
        return start + "; ".join(f"{status.name} is behind the others, in {status.place}" for status in behind)
    places = ", ".join(dict.fromkeys(status.place for status in statuses if not status.ended))
    return f"{start}all of them are in {places}"


def own_host() -> str:
    """Return the name by which the ranks of this host identify it."""
    return os.uname().nodename


# One rank's heartbeat: the status file and the log that it writes for the other ranks, and what it reads of theirs.


BEAT_S = 5.0  # between two beats when nothing changes; shared storage gets one from every rank
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
        with contextlib.suppress(OSError):  # a full disk has more important victims
            self.log.write(f"{time.strftime('%H:%M:%S')} {printable(text)}\n")

    def write(self) -> None:
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
