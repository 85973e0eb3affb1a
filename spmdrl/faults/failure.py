"""Failures of the loop: the first rank to fail writes the cause for all, the others log what they saw.

A lost connection to another rank is no cause: the rank that lost it waits for the cause, and reports the rank that is
gone if nobody names one.
"""

from __future__ import annotations

import dataclasses
import os
import time
import traceback
from collections.abc import Sequence
from typing import Any

from spmdrl.faults.cause import OomKills, chain, hints_of, is_secondary, no_room
from spmdrl.faults.heartbeat import BEATS_MISSED, Heartbeat
from spmdrl.faults.rank_status import RankStatus, has_ended, silent
from spmdrl.faults.verdict import EXIT_LOST_RANK, SUPERVISED, ErrorReport, Kind, claim
from spmdrl.types import TrainingDiverged, UserError

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
