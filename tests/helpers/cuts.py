"""Runs that are cut: a signal at a moment of a step, which a rank sends to itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from spmdrl.faults.watch import Watch
from spmdrl.report import Report
from spmdrl.train import main
from tests.helpers.small_run import without_curves


def entering(step: int, phase: str, number: signal.Signals, rank: int) -> None:
    """Send a rank a signal as it enters a phase of a step."""
    enter = Watch.enter

    def enter_and_signal(watch: Watch, entered: str) -> None:
        enter(watch, entered)
        if (watch._heartbeat.status.step, entered) == (step, phase) and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), number)

    Watch.enter = enter_and_signal


def nowhere() -> None:
    """Cut nothing."""


def cut(argv: list[str], patch: Callable[[], None]) -> int:
    """Run one rank's program; `evaluations` in the run's folder gets the step of each one."""
    show = Report.eval

    def note_and_show(report: Report, step: int, scalars: Any, **others: Any) -> None:
        if report._folder is not None:
            with (report._folder.path / "evaluations").open("a") as file:
                file.write(f"{step}\n")
        show(report, step, scalars, **others)

    Report.eval = note_and_show
    patch()
    return without_curves(main, argv)
