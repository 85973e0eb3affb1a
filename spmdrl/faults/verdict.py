"""How a launch ended: one cause, written by the first rank that knows it, or the wish to be started again.

Needs nothing but Python, so that the program that starts the ranks can read it at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from spmdrl.faults.files import FaultFiles, read_json, replace_json

EXIT_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3
EXIT_LOST_RANK = 4
EXIT_HANG = 5
EXIT_REQUEUE = 75  # sysexits' "try again later"; only of the programs in launch/
EXIT_INTERRUPTED = 130  # as shells say it for SIGINT

# The programs in launch/ set it for the ranks: then they tell how the run ended, after everything else.
SUPERVISED = "SPMDRL_SUPERVISED"

Kind = Literal["error", "user", "diverged", "lost", "hang"]
EXIT_CODES: dict[Kind, int] = {
    "error": EXIT_ERROR,
    "user": EXIT_USER_ERROR,
    "diverged": EXIT_DIVERGED,
    "lost": EXIT_LOST_RANK,
    "hang": EXIT_HANG,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """`error.json`."""

    launch: str
    kind: Kind
    rank: int  # whose failure it is, which for a rank that died is not who wrote this
    num_ranks: int
    host: str
    pid: int
    step: int
    phase: str
    message: str  # the last line of the traceback, or all that there is to say
    traceback: str = ""  # empty where the message is enough
    hints: list[str] = field(default_factory=list)  # what else is known about the cause, in sentences
    stacks: str = ""  # after a hang: where the ranks were
    log_lines: list[str] = field(default_factory=list)
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    complete: bool = True  # after a hang: whether the stacks have been gathered

    @property
    def exit_code(self) -> int:
        """Of the rank that reports it, and of the programs in launch/."""
        return EXIT_CODES[self.kind]

    def text(self) -> str:
        """What the user reads."""
        if self.kind in ("user", "diverged"):
            stuck = "cannot go on" if self.step else "cannot start"
            return tell(stuck if self.kind == "user" else "training diverged", self.message)
        place = f"step {self.step}, {self.phase}" if self.step else self.phase
        parts = [f"rank {self.rank} of {self.num_ranks} ({self.host}, pid {self.pid}) failed in {place}:"]
        if self.kind in ("lost", "hang"):
            parts = [self.message]
        elif self.traceback:
            parts.append(self.traceback.rstrip())
        else:
            parts.append(self.message)
        if self.kind == "lost" and self.log_lines:
            parts += ["the end of its log:", *(f"    {line}" for line in self.log_lines)]
        parts += [self.stacks.rstrip()] if self.stacks else []
        return "\n".join([*parts, *self.hints])


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """The file `requeue`."""

    launch: str
    step: int  # that was saved
    num_steps: int
    given_up: bool  # whether the step after it had begun
    reason: str
    again: bool  # whether starting again at once makes sense

    def text(self) -> str:
        """What the user reads."""
        again = "the same command goes on" if self.again else "the same command with a later run.stop_before goes on"
        given_up = f", step {self.step + 1} was given up" if self.given_up else ""
        return f"stopped after step {self.step} of {self.num_steps} ({self.reason}){given_up}; {again}"


def tell(what: str, problems: str) -> str:
    """A sentence, or one line for each of several problems."""
    lines = problems.splitlines()
    return f"{what}: {lines[0]}" if len(lines) == 1 else "\n  - ".join([f"{what}:", *lines])


Claim = Literal["first", "late", "unwritten"]


def claim(files: FaultFiles, report: ErrorReport) -> Claim:
    """Make `report` the cause of the failure, unless another rank was first; "unwritten" when the disk refuses."""
    try:
        descriptor = os.open(files.error, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return "late"
    except OSError:
        return "unwritten"
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(report), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return "unwritten"
    return "first"


def complete(files: FaultFiles, report: ErrorReport) -> None:
    """Put the finished report in the place of the one that was claimed with."""
    with contextlib.suppress(OSError):
        replace_json(files.error, dataclasses.asdict(report))


def read_error(files: FaultFiles, *, launch: str | None = None) -> ErrorReport | None:
    """The cause of a launch's failure, or of the latest; None when there is none."""
    report = _read(ErrorReport, files.error)
    return report if report is not None and launch in (None, report.launch) else None


def read_requeue(files: FaultFiles) -> Requeue | None:
    """The wish to be started again, if there is one."""
    return _read(Requeue, files.requeue)


VerdictT = TypeVar("VerdictT", ErrorReport, Requeue)


def _read(kind: type[VerdictT], path: Path) -> VerdictT | None:
    content: dict[str, Any] | None = read_json(path)
    if content is None or content.keys() != {field.name for field in dataclasses.fields(kind)}:
        return None
    return kind(**content)


def write_requeue(files: FaultFiles, requeue: Requeue) -> None:
    """Leave the wish to be started again; whoever asked the run to stop has been heard."""
    replace_json(files.requeue, dataclasses.asdict(requeue))
    files.stop.unlink(missing_ok=True)
