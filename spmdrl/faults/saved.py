"""Which steps a run has saved, by the names of its checkpoints. Needs only the standard library.

`step-00000012` is complete: it got that name last. Any other name is of one that is not.
"""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})")


def step_of(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's name; None if the checkpoint is not finished, or the name is not one.

    Only the name counts: a dangling link is a checkpoint that cannot be loaded, not a missing checkpoint.
    """
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of all finished checkpoints, oldest first."""
    steps = (step_of(path) for path in folder.glob("step-*"))
    return sorted(step for step in steps if step is not None)


def newest_step(folder: Path) -> int:
    """Return the step of the newest finished checkpoint, 0 when there is none."""
    return max(saved_steps(folder), default=0)
