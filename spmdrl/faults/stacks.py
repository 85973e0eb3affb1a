"""Stacks of running processes: ask for them with SIGUSR2, and read what faulthandler writes.

A rank and the processes of its engine write the stacks of all their threads to the rank's log. faulthandler does so
in the signal handler itself, so it works even while the main thread waits inside a library.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil

from spmdrl.faults.files import open_ordinary
from spmdrl.faults.text import in_ranges

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
