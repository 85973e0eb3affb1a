"""Runs that are cut: a signal at a moment of a step, which a rank sends to itself."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdrl.checkpoint.manifest import newest_step
from spmdrl.faults.watch import Watch
from spmdrl.report import Report
from spmdrl.train import main
from tests.helpers.small_run import without_curves

PUBLISHED_S = 20.0  # more than the checkpoint of a tiny model takes


class Step:
    """A step of this process's run, if it is that rank, in which something will kill it."""

    def __init__(self, number: int, rank: int) -> None:
        self.number, self.is_now, self._checkpoints = number, False, Path()
        enter = Watch.enter

        def enter_and_note(watch: Watch, entered: str) -> None:
            enter(watch, entered)
            status = watch._heartbeat.status
            self.is_now = status.step == number and os.environ["RANK"] == str(rank)
            self._checkpoints = watch._heartbeat.files.checkpoints

        Watch.enter = enter_and_note

    def die(self) -> None:
        """Kill the process, once the step before is saved: that happens in the background."""
        until = time.monotonic() + PUBLISHED_S
        while (newest_step(self._checkpoints) or 0) < self.number - 1 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def entering(step: int, phase: str, number: signal.Signals, rank: int) -> None:
    """Send a rank a signal as it enters a phase of a step."""
    enter = Watch.enter

    def enter_and_signal(watch: Watch, entered: str) -> None:
        enter(watch, entered)
        if (watch._heartbeat.status.step, entered) == (step, phase) and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), number)

    Watch.enter = enter_and_signal


def after_phases(count: int, delay_s: float, rank: int) -> None:
    """Kill a rank, wherever it is then, some time after it has entered its `count`-th phase since the launch."""
    enter, entered = Watch.enter, itertools.count(1)

    def enter_and_die_later(watch: Watch, phase: str) -> None:
        enter(watch, phase)
        if os.environ["RANK"] == str(rank) and next(entered) == count:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    Watch.enter = enter_and_die_later


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
