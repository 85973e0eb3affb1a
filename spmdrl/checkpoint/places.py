"""Names of checkpoints in a run's folder.

`step-00000012` is complete (`faults/saved.py`). Other names have a suffix: `unfinished` was being written, `removed`
was being deleted, `broken` was skipped when the run resumed from an older one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

# What is complete is known where nothing of torch is, too.
from spmdrl.faults.saved import newest_step as newest_step
from spmdrl.faults.saved import saved_steps as saved_steps
from spmdrl.faults.saved import step_of as step_of

UNFINISHED, REMOVED, BROKEN = ".unfinished", ".removed", ".broken"


def folder_of(folder: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step`."""
    return folder / f"step-{step:08d}"


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
