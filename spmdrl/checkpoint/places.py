"""Where checkpoints lie in a run's folder, and by which names.

`step-00000012` is whole: it got that name last. Others end in a word: `unfinished` was being written, `removed` was
being deleted, `broken` was passed over when the run went on from an older one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"step-(\d{8,})")
UNFINISHED, REMOVED, BROKEN = ".unfinished", ".removed", ".broken"


def folder_of(folder: Path, step: int) -> Path:
    """The directory of the checkpoint of `step`."""
    return folder / f"step-{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """The step that a checkpoint's name says; None for one that is not finished, or is something else.

    The name alone: a link to storage that is not there is a checkpoint that cannot be loaded, and not none at all.
    """
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def saved_steps(folder: Path) -> list[int]:
    """The steps of all checkpoints that were finished, oldest first."""
    steps = (step_of(path) for path in folder.glob("step-*"))
    return sorted(step for step in steps if step is not None)


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint that was finished, 0 when there is none."""
    return max(saved_steps(folder), default=0)


def leftovers(folder: Path) -> list[Path]:
    """What launches that were killed have left unfinished."""
    return sorted(path for word in (UNFINISHED, REMOVED) for path in folder.glob(f"step-*{word}"))


def rename(checkpoint: Path, word: str) -> Path:
    """Give the directory of a checkpoint one of the words above, in place of what has that name."""
    target = checkpoint.with_suffix(word)
    if target.is_symlink() or target.exists():
        delete(target)
    checkpoint.rename(target)
    return target


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint so that a kill in between leaves nothing that looks whole."""
    delete(rename(checkpoint, REMOVED))


def delete(path: Path) -> None:
    """Delete a directory and what is in it, or a link, but not what that leads to."""
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
