"""The watchdog: ends a run in which no rank makes progress, after collecting the stacks of all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch

from spmdrl.faults.failure import new_report, place_of
from spmdrl.faults.rank_status import (
    BEATS_MISSED,
    Heartbeat,
    RankStatus,
    describe_hang,
    furthest_behind,
    process_state,
    silent,
    stuck,
)
from spmdrl.faults.stacks import (
    BEGIN,
    DONE,
    END,
    ask_descendants,
    ask_for_stacks,
    grouped,
    main_stack,
    size_of,
    text_after,
)
from spmdrl.faults.text import say
from spmdrl.faults.verdict import EXIT_HANG, SUPERVISED, claim, complete

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
