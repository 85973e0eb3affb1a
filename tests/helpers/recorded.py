"""Recorded runs of the demo: the first 60 steps of 120, two seeds, and one with a tenth of the learning rate.

Of metrics.jsonl they have the scalars that are shown somewhere, to four digits; `demo-1` also has samples and ranks.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "data/recorded"
SEEDS = (RECORDED / "demo-1", RECORDED / "demo-2")
SLOW = RECORDED / "slow-1"


def as_if_running(folder: Path) -> Path:
    """Copy a recorded run into a folder as if its ranks had just beaten; returns the copy."""
    run = folder / "demo"
    shutil.copytree(SEEDS[0], run)
    beat(run)
    return run


def beat(run: Path, *, at: float | None = None) -> None:
    """Make the ranks' last beats those of a unix time, by default of now."""
    then = time.time() if at is None else at
    for status in (run / "ranks").iterdir():
        os.utime(status, (then, then))
