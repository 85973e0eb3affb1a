"""Verdicts: how a launch ended. Either one cause, written by the first rank that fails, or a request to start it again.

Needs only the standard library, so that the program that starts the ranks can import it quickly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from spmdrl.faults.files import FaultFiles, read_fields, replace_json
from spmdrl.faults.text import printable, say

EXIT_ERROR = 1
EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3
EXIT_LOST_RANK = 4
EXIT_HANG = 5
EXIT_REQUEUE = 75  # EX_TEMPFAIL, "try again later", of sysexits.h; only the programs in launch/ return it
EXIT_INTERRUPTED = 130  # the code of shells for SIGINT

# Set by the programs in launch/, which print how the run ended, as their last output, so the ranks need not.
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
    """The content of `error.json`: the cause of a failure."""

    launch: str
    kind: Kind
    rank: int  # the rank that failed; if it was killed, another rank wrote this
    num_ranks: int
    host: str
    pid: int
    step: int
    phase: str
    message: str  # the last line of the traceback, or the whole error
    traceback: str = ""  # empty where the message is enough
    hints: list[str] = field(default_factory=list)  # more about the cause, in sentences
    stacks: str = ""  # after a hang: where the ranks were
    log_lines: list[str] = field(default_factory=list)
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    complete: bool = True  # False after a hang until the stacks have been gathered

    @property
    def exit_code(self) -> int:
        """The exit code of the rank that reports it, and of the programs in launch/."""
        return EXIT_CODES[self.kind]

    def text(self) -> str:
        """Format the report for the user."""
        if self.kind in ("user", "diverged"):
            stuck = "cannot go on" if self.step else "cannot start"
            return list_problems(stuck if self.kind == "user" else "training diverged", self.message)
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
        return printable("\n".join([*parts, *self.hints]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeue:
    """The content of the file `requeue`: the run stopped on request and can be started again."""

    launch: str
    step: int  # the last step that was saved
    num_steps: int
    given_up: bool  # True when the step after it had started
    reason: str
    again: bool  # True when it can be started again at once

    def text(self) -> str:
        """Say after which step the run stopped, why, and how it is continued."""
        later = "" if self.again else " with a later run.stop_before"
        given_up = f", step {self.step + 1} was discarded" if self.given_up else ""
        return (
            f"stopped after step {self.step} of {self.num_steps} ({self.reason}){given_up}; run the same command "
            f"again{later} to continue"
        )


def make_stdio_lenient() -> None:
    """Let the console print what its encoding does not have, by backslashes."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def print_once_per_node(text: str) -> None:
    """Print to standard error from one rank of each node: one node may lack what another one has."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    node = "" if os.environ.get("RANK", "0") == "0" else f"{platform.node()}: "
    say(node + text, sys.stderr)


def list_problems(title: str, problems: str) -> str:
    """Put a title before a problem, or before a list if `problems` has a line for each of several. An indented line,
    such as one of a traceback, belongs to the problem before it."""
    problems = printable(problems)
    lines = problems.splitlines()
    if all(_is_indented(line) for line in lines[1:]):
        return f"{title}: {problems}"
    return "\n".join([f"{title}:", *(f"    {line}" if _is_indented(line) else f"  - {line}" for line in lines)])


def _is_indented(line: str) -> bool:
    return line.startswith(" ")


Claim = Literal["first", "late", "unwritten"]


def claim(files: FaultFiles, report: ErrorReport) -> Claim:
    """Make `report` the cause of the failure unless another rank was first; "unwritten" when writing it fails."""
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
    """Replace the report that was given to `claim` by the finished one."""
    with contextlib.suppress(OSError):
        replace_json(files.error, dataclasses.asdict(report))


def read_error(files: FaultFiles, *, launch: str | None = None) -> ErrorReport | None:
    """Read the cause of a launch's failure, or of the latest launch's; None when there is none."""
    report = _read(ErrorReport, files.error)
    return report if report is not None and launch in (None, report.launch) else None


def read_requeue(files: FaultFiles) -> Requeue | None:
    """Read the request to start the run again, if there is one."""
    return _read(Requeue, files.requeue)


VerdictT = TypeVar("VerdictT", ErrorReport, Requeue)


def _read(kind: type[VerdictT], path: Path) -> VerdictT | None:
    content = read_fields(path, {field.name: str(field.type) for field in dataclasses.fields(kind)})
    if content is None or content.get("kind", "error") not in EXIT_CODES:
        return None
    return kind(**content)


def write_requeue(files: FaultFiles, requeue: Requeue) -> None:
    """Write the request to start the run again, and remove the file `stop`, which has been served."""
    replace_json(files.requeue, dataclasses.asdict(requeue))
    with contextlib.suppress(OSError):  # the next launch refuses what cannot be removed
        files.stop.unlink()
