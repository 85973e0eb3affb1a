"""Where processes are in their code: what faulthandler writes, on SIGUSR2 or when asked, and how it is read again.

A rank and the processes of its engine write the stacks of all their threads to the rank's log. faulthandler does it in
the signal's handler itself, so also where the main thread waits inside a library.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil

DUMP_SIGNAL = signal.SIGUSR2
# Lines around what a rank writes of its own accord, and after everything that it has to say.
BEGIN, END, DONE = "--- stacks of", "--- end of stacks", "--- nothing else"
# Set for the processes of an engine: the log that they write to. Their part of this is in
# `engine/sglang/cpu/startup/sitecustomize.py`, which imports nothing of spmdrl.
STACKS_TO = "SPMDRL_STACKS_TO"


def listens(pid: int) -> bool:
    """Whether a process of this host has a handler for the signal; one without would end by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (DUMP_SIGNAL - 1) & 1)


def ask_for_stacks(pid: int) -> bool:
    """Have a process of this host write its stacks; False when it would not."""
    if not listens(pid):
        return False
    try:
        os.kill(pid, DUMP_SIGNAL)
    except OSError:
        return False
    return True


def ask_descendants(pid: int) -> int:
    """The same for the processes that it started, such as an engine's; returns how many will write."""
    try:
        descendants = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return 0
    return sum(ask_for_stacks(process.pid) for process in descendants)


def text_after(path: Path, start: int) -> str:
    """What was written to a file since it had `start` bytes."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def size_of(path: Path) -> int:
    """Bytes in a file, 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def main_stack(text: str) -> str:
    """The frames of the main thread of the first process that wrote its stacks; "" if none did."""
    for section in re.split(r"^--- .*\n", text, flags=re.MULTILINE):
        threads = re.split(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\n", section, flags=re.MULTILINE)[1:]
        if threads:  # faulthandler begins with the newest
            return "\n".join(line for line in threads[-1].splitlines() if line.startswith("  File "))
    return ""


def grouped(stacks: Mapping[int, str]) -> str:
    """The main threads of all ranks, those that are in the same place together."""
    ranks_by_stack: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        ranks_by_stack.setdefault(stack, []).append(rank)
    return "\n".join(
        f"main thread of {ranks_phrase(ranks)} (most recent call first):\n{stack or '  it has not answered'}"
        for stack, ranks in ranks_by_stack.items()
    )


def ranks_phrase(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`; the ranks in order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    written = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {written}" if len(ranks) == 1 else f"ranks {written}"
