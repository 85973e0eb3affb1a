"""Failures of the loop: the first rank to fail writes the cause for all, the others log what they saw; and hangs.

A lost connection to another rank is no cause: the rank that lost it waits for the cause, and reports the rank that is
gone if nobody names one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from spmdrl.faults.files import open_ordinary
from spmdrl.faults.rank_status import (
    BEATS_MISSED,
    Heartbeat,
    RankStatus,
    describe_hang,
    furthest_behind,
    has_ended,
    process_state,
    silent,
    stuck,
)
from spmdrl.faults.text import in_ranges, say
from spmdrl.faults.verdict import EXIT_HANG, EXIT_LOST_RANK, SUPERVISED, ErrorReport, Kind, claim, complete
from spmdrl.types import TrainingDiverged, UserError

# Stacks of running processes: ask for them with SIGUSR2, and read what faulthandler writes.
#
# A rank and the processes of its engine write the stacks of all their threads to the rank's log. faulthandler does so
# in the signal handler itself, so it works even while the main thread waits inside a library.


DUMP_SIGNAL = signal.SIGUSR2
# Lines around the stacks that a rank writes of itself, and after the last of its output.
BEGIN, END, DONE = "--- stacks of", "--- end of stacks", "--- nothing else"
# Names the log to the processes of an engine. They read it in `engine/sglang/startup/sitecustomize.py`, which
# imports nothing of spmdrl.
STACKS_TO = "SPMDRL_STACKS_TO"


def listens(pid: int) -> bool:
    """True when a process of this host has a handler for the signal, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (DUMP_SIGNAL - 1) & 1)


def ask_for_stacks(pid: int) -> bool:
    """Ask a process of this host to write its stacks; False when it cannot."""
    if not listens(pid):
        return False
    try:
        os.kill(pid, DUMP_SIGNAL)
    except OSError:
        return False
    return True


def ask_descendants(pid: int) -> int:
    """Ask all descendants of a process, such as its engine's, to write their stacks; returns how many will."""
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return 0
    return sum(ask_for_stacks(process.pid) for process in descendants)


def text_after(path: Path, start: int) -> str:
    """Read the text after the first `start` bytes of a file."""
    try:
        with open_ordinary(path) as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def main_stack(text: str) -> str:
    """Find the frames of the main thread of the first process in a log; "" if there are no stacks."""
    for section in re.split(r"^--- .*\n", text, flags=re.MULTILINE):
        threads = re.split(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\n", section, flags=re.MULTILINE)[1:]
        if threads:  # faulthandler writes the newest thread first
            return "\n".join(line for line in threads[-1].splitlines() if line.startswith("  File "))
    return ""


def grouped(stacks: Mapping[int, str]) -> str:
    """List the main threads of all ranks, with equal stacks shown once."""
    ranks_by_stack: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        ranks_by_stack.setdefault(stack, []).append(rank)
    return "\n".join(
        f"main thread of {ranks_phrase(ranks)} (most recent call first):\n{stack or '  no response'}"
        for stack, ranks in ranks_by_stack.items()
    )


def ranks_phrase(ranks: list[int]) -> str:
    """Write `rank 3`, or `ranks 0-2, 5`, for ranks in order."""
    return f"rank{'s' if len(ranks) > 1 else ''} {in_ranges(ranks)}"


# Causes of failures: tell a cause from its consequences, and find hints about it on this machine.


# Messages of torch's backends when another process is gone.
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "was closed",
    "NCCL communicator was aborted",
)
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file is too large",
}
# For an OSError of which only the message is left.
_FULL_WORDS = {
    "No space left on device": "the disk is full",
    "Disk quota exceeded": "the disk quota is used up",
    "File too large": "a file is too large",
}


def is_secondary(error: BaseException) -> bool:
    """True when an error only says that another rank is gone."""
    from_torch = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
    return from_torch and any(words in str(error) for words in _LOST)


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, then its causes, the newest first."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def hints_of(error: BaseException, oom_before: OomKills) -> list[str]:
    """Return sentences about causes that a traceback hides: a full disk, exhausted device or host memory, OOM kills."""
    hints = [*_disk_hints(error), *OomKills.now().since(oom_before)]
    errors = list(chain(error))
    if any(isinstance(one, torch.OutOfMemoryError) for one in errors):
        hints.append("the device's memory is used up: see docs/memory.md")
    elif any(isinstance(one, MemoryError) or "DefaultCPUAllocator" in str(one) for one in errors):
        hints.append("host memory is used up: this process could not allocate any more")
    return list(dict.fromkeys(hints))


def no_room(error: BaseException) -> str | None:
    """Return a sentence about an error of a disk or a file that takes no more, None for other errors."""
    for one in chain(error):
        if isinstance(one, OSError) and one.errno in _FULL:
            remedy = "raise the limit on the size of files (ulimit -f)" if one.errno == errno.EFBIG else "make room"
            return f"{_FULL[one.errno]}{f', writing {one.filename}' if one.filename else ''}: {remedy} and start again"
    return None


def _disk_hints(error: BaseException) -> Iterator[str]:
    if sentence := no_room(error):
        yield sentence
        return
    for one in chain(error):
        for words, meaning in _FULL_WORDS.items():
            if words in str(one):
                yield f"{meaning}: make room and start again"
                return


@dataclass(frozen=True, slots=True)
class OomKills:
    """Counts of processes that the kernel has killed for lack of memory."""

    of_group: int  # in this process's memory cgroup
    of_host: int  # on this host

    @classmethod
    def now(cls) -> OomKills:
        """Read the current counts; 0 where the kernel reports none."""
        return cls(of_group=_count(_group_file(), "oom_kill"), of_host=_count(Path("/proc/vmstat"), "oom_kill"))

    def since(self, before: OomKills) -> list[str]:
        """Describe the kills since the counts `before`, in at most one sentence."""
        if (count := self.of_group - before.of_group) > 0:
            return [f"host memory is used up: the kernel has killed {_processes(count)} of this job's memory cgroup"]
        if (count := self.of_host - before.of_host) > 0:
            return [f"the kernel has killed {_processes(count)} of this host for lack of memory since the run started"]
        return []


def _processes(count: int) -> str:
    return "a process" if count == 1 else f"{count} processes"


def _group_file() -> Path:
    """Find the file with the kernel's counts for this process's memory cgroup, version 2 or 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    fields = [line.split(":", 2) for line in lines]
    for number, controllers, path in fields:
        if number == "0" and (found := Path(f"/sys/fs/cgroup{path}/memory.events")).exists():
            return found
        if "memory" in controllers.split(","):
            for folder in (f"/sys/fs/cgroup/memory{path}", "/sys/fs/cgroup/memory"):
                if (found := Path(folder, "memory.oom_control")).exists():
                    return found
    return Path("/sys/fs/cgroup/memory.events")


def _count(path: Path, name: str) -> int:
    """Read the number on the line `name number` of a file; 0 without the file or the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(value) for key, _, value in (line.partition(" ") for line in lines) if key == name)


CAUSE_WAIT_S = 2.0  # for the rank that knows the cause to report it, once a connection is lost


class JobFailed(Exception):
    """A failure that has been reported; `words` are left to print for this rank, if any, and `exit_code` to return."""

    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.words, self.exit_code = words, exit_code


def failure_in(error: BaseException) -> JobFailed | None:
    """Find the reported failure in an error's chain of causes: cleaning up after a failure may raise again."""
    return next((one for one in chain(error) if isinstance(one, JobFailed)), None)


def report_failure(heartbeat: Heartbeat, error: Exception, oom_kills: OomKills) -> JobFailed:
    """Report the error that ended the loop on this rank; returns the exception to raise in its place.

    `oom_kills` were counted when the run started.
    """
    details = "".join(traceback.format_exception(error))
    if is_secondary(error):
        heartbeat.note(f"a secondary error, caused by the end of another rank:\n{details}")
        return _report_lost_rank(heartbeat, error, details, oom_kills)
    kind = _kind_of(error)
    message = str(error) if kind != "error" else traceback.format_exception_only(error)[-1].strip()
    if kind == "error" and (sentence := no_room(error)):
        kind, message = "user", sentence
    hints = hints_of(error, oom_kills)
    report = new_report(heartbeat, kind, message, traceback=details if kind == "error" else "", hints=hints)
    return _claim(heartbeat, report, details)


def new_report(
    heartbeat: Heartbeat, kind: Kind, message: str, *, traceback: str = "", hints: Sequence[str] = ()
) -> ErrorReport:
    """Make a report of a failure on this rank, with its place and the last lines of its log."""
    status = heartbeat.status
    return ErrorReport(
        launch=status.launch,
        kind=kind,
        num_ranks=status.num_ranks,
        message=message,
        traceback=traceback,
        hints=list(hints),
        log_lines=heartbeat.files.last_lines(status.rank),
        **place_of(status),
    )


def place_of(status: RankStatus) -> dict[str, Any]:
    """Return the fields of a report that name the failed rank and where it was."""
    return {"rank": status.rank, "host": status.host, "pid": status.pid, "step": status.step, "phase": status.phase}


def _report_lost_rank(heartbeat: Heartbeat, error: Exception, details: str, oom_kills: OomKills) -> JobFailed:
    """Wait for the rank that is gone to report the cause; if it does not, report what can be seen from here."""
    before, host = heartbeat.other_ranks(), heartbeat.status.host
    deadline = time.monotonic() + CAUSE_WAIT_S
    while time.monotonic() < deadline and not heartbeat.rank_failed():
        time.sleep(0.1)
    if heartbeat.rank_failed():
        return JobFailed("", EXIT_LOST_RANK)
    dead = [status for status in before if has_ended(status, host)]
    if not dead:  # it may be on another host, where only missing beats show it
        time.sleep(max(0.0, BEATS_MISSED * heartbeat.beat_s - CAUSE_WAIT_S))
        dead = [status for status in silent(before, heartbeat.other_ranks()) if status.host != host]
    hints = OomKills.now().since(oom_kills)
    if not dead:
        message = traceback.format_exception_only(error)[-1].strip()
        return _claim(heartbeat, new_report(heartbeat, "error", message, traceback=details, hints=hints), details)
    sentences = [f"{status.name} ended without an error message in {status.place}" for status in dead]
    report = dataclasses.replace(
        new_report(heartbeat, "lost", "; ".join(sentences) + ": it was killed, or crashed in native code", hints=hints),
        **place_of(dead[0]),
        log_lines=heartbeat.files.last_lines(dead[0].rank),
    )
    return _claim(heartbeat, report, details)


def _claim(heartbeat: Heartbeat, report: ErrorReport, details: str) -> JobFailed:
    """Make the report the cause for all ranks, or log it if another rank was first.

    The first rank prints it, unless the program that started the ranks will.
    """
    won = claim(heartbeat.files, report)
    if won == "late":
        heartbeat.note(f"another rank failed before this one:\n{details}")
        return JobFailed("", report.exit_code)
    prints = won == "unwritten" or SUPERVISED not in os.environ
    return JobFailed(report.text() if prints else "", report.exit_code)


def _kind_of(error: Exception) -> Kind:
    if isinstance(error, UserError):
        return "user"
    return "diverged" if isinstance(error, TrainingDiverged) else "error"


# The watchdog: ends a run in which no rank makes progress, after collecting the stacks of all ranks.


ANSWER_S = 10.0  # for all ranks to write their stacks
BY_ITSELF_S = 4.0  # of these, for a rank to notice the report and write its own


class Watchdog:
    """Detects a hang from the watch's thread. With `timeout_s` 0 it never finds one."""

    def __init__(self, heartbeat: Heartbeat, *, timeout_s: float, tick_s: float) -> None:
        self._heartbeat, self._timeout_s, self._tick_s = heartbeat, timeout_s, tick_s
        # Every rank may read the status of every rank.
        self._check_s = max(tick_s, timeout_s / 20, heartbeat.status.num_ranks / 10)
        self._check_at = 0.0

    def check(self, now: float) -> None:
        """End the run if no rank has made progress for `timeout_s`; `now` is `time.monotonic()`.

        The status of other ranks is only read once this rank itself has been stuck for that long.
        """
        moved_at = self._heartbeat.status.moved_at
        if self._timeout_s and now >= self._check_at and time.time() - moved_at > self._timeout_s:
            self._check_at = now + self._check_s
            self._look_for_hang()

    def join_hang(self) -> NoReturn:
        """Write this rank's stacks for the rank that reports the hang, and end once the report is complete."""
        self._dump()
        for status in self._heartbeat.other_ranks():
            self._continue(status)
        deadline = time.monotonic() + 2 * ANSWER_S
        while time.monotonic() < deadline:
            report = self._heartbeat.error()
            if report is not None and report.complete:
                break
            time.sleep(self._tick_s)
        os._exit(EXIT_HANG)

    def _look_for_hang(self) -> None:
        """If the run is stuck, report it with the stacks of all ranks, and end."""
        heartbeat, files = self._heartbeat, self._heartbeat.files
        before = heartbeat.all_ranks()
        if not stuck(before, now=time.time(), timeout_s=self._timeout_s):
            return
        heartbeat.beat_for(BEATS_MISSED * heartbeat.beat_s)
        statuses = heartbeat.all_ranks()
        if not stuck(statuses, now=time.time(), timeout_s=self._timeout_s):
            return
        unheard = [status for status in silent(before, statuses) if status.rank != heartbeat.status.rank]
        sizes = {status.rank: size_of(files.log_of(status.rank)) for status in statuses}
        message = describe_hang(statuses, {status.rank for status in unheard}, timeout_s=self._timeout_s)
        culprit = next(iter(unheard or furthest_behind(statuses)), heartbeat.status)
        report = dataclasses.replace(new_report(heartbeat, "hang", message), **place_of(culprit), complete=False)
        if claim(files, report) == "late":
            self.join_hang()
        self._dump()
        for status in unheard:
            self._continue(status)
        texts = self._wait_for_stacks(sizes, BY_ITSELF_S)
        for status in unheard:  # two stacks that are written at the same time would mix
            if DONE not in texts[status.rank] and self._is_local(status):
                ask_for_stacks(status.pid)
        texts = self._wait_for_stacks(sizes, ANSWER_S - BY_ITSELF_S)
        stacks = {rank: main_stack(text) for rank, text in texts.items()}
        text = f"{grouped(stacks)}\nall threads, and the processes of engines: {files.log_of(0).parent}/rank-*.log"
        hints = ["set watchdog.timeout_s higher if a phase may take this long"] if not unheard else []
        report = dataclasses.replace(report, stacks=text, hints=hints, complete=True)
        complete(files, report)
        if SUPERVISED not in os.environ:
            say(report.text(), sys.stderr)
        for status in unheard:
            if self._is_local(status) and process_state(status.pid) is not None:
                with contextlib.suppress(OSError):
                    os.kill(status.pid, signal.SIGKILL)
        os._exit(EXIT_HANG)

    def _wait_for_stacks(self, sizes: Mapping[int, int], limit_s: float) -> dict[int, str]:
        """Return what ranks have written since their logs had these sizes; waits for all of them, up to a limit."""
        files, deadline = self._heartbeat.files, time.monotonic() + limit_s
        while True:
            texts = {rank: text_after(files.log_of(rank), size) for rank, size in sizes.items()}
            if all(DONE in text for text in texts.values()) or time.monotonic() > deadline:
                return texts
            self._heartbeat.beat_for(self._tick_s)

    def _continue(self, status: RankStatus) -> None:
        """Continue a rank of this host that was stopped: it writes its stacks when it finds the report."""
        if self._is_local(status) and process_state(status.pid) == "T":
            with contextlib.suppress(OSError):
                os.kill(status.pid, signal.SIGCONT)

    def _is_local(self, status: RankStatus) -> bool:
        return status.host == self._heartbeat.status.host

    def _dump(self) -> None:
        """Write the stacks of this rank and its engine to its log, and torch's flight record to a file of its own."""
        own, log = self._heartbeat.status, self._heartbeat.log
        with contextlib.suppress(OSError):
            log.write(f"{BEGIN} rank {own.rank} in {own.place}\n")
            faulthandler.dump_traceback(log)
            log.write(f"{END}\n")
            ask_descendants(own.pid)
            if record := _flight_record():
                self._heartbeat.files.flight_record_of(own.rank).write_text(record, encoding="utf-8")
            log.write(f"{DONE}\n")


def _flight_record() -> str:
    """Return torch's record of the last collectives as JSON, "" where it keeps none."""
    dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    try:
        return "" if dump is None else dump().decode()
    except RuntimeError:
        return ""
