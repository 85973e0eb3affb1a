"""Reward items, and the processes that a reward leaves behind."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmdrl.rewards.worker import RewardItem


def item(response: str, answer: str | None = None, *, task: str = "default", **metadata: Any) -> RewardItem:
    return RewardItem(prompt="prompt", response=response, answer=answer, metadata=metadata, task=task)


def running(*arguments: str) -> list[int]:
    """Processes, zombies aside, whose command line has all of these arguments."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if {*arguments} <= {*(place / "cmdline").read_bytes().decode(errors="replace").split("\0")}:
                found.append(int(place.name))
    return found


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """True once the condition was; it is not asked again, since a process may have started something meanwhile."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def python_path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join(sys.path)}
