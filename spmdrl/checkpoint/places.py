"""Names of checkpoints in a run's folder.

`step-00000012` is complete: it got that name last. Other names have a suffix: `unfinished` was being written, `removed`
was being deleted, `broken` was skipped when the run resumed from an older one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})")
UNFINISHED, REMOVED, BROKEN = ".unfinished", ".removed", ".broken"


def folder_of(folder: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step`."""
    return folder / f"step-{step:08d}"


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


def leftovers(folder: Path) -> list[Path]:
    """Return the directories that killed launches were writing or deleting."""
    return sorted(path for word in (UNFINISHED, REMOVED) for path in folder.glob(f"step-*{word}"))


def rename(checkpoint: Path, word: str) -> Path:
    """Rename a checkpoint's directory with one of the suffixes above; replaces what has that name."""
    target = checkpoint.with_suffix(word)
    if target.is_symlink() or target.exists():
        delete(target)
    checkpoint.rename(target)
    return target


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; if this is interrupted, nothing is left that looks complete."""
    delete(rename(checkpoint, REMOVED))


def delete(path: Path) -> None:
    """Delete a directory with its content, or a link without its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
