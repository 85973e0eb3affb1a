"""Files of snapshots in a hub's cache, which are links to the blobs of the same repository.

The cache has `datasets--ORGANISATION--NAME/snapshots/COMMIT` with these links, and `blobs` beside `snapshots`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


def blob_of(entry: Path, root: Path) -> Path | None:
    """Return the blob that `entry` is a link to; None for everything that the cache itself does not make.

    `root` is a snapshot's folder, or one in it, without links. The link lies in the root, and leads to a file among the
    blobs of its repository, in one step.
    """
    snapshot = next((folder for folder in (root, *root.parents) if _is_snapshot(folder)), None)
    folder = Path(os.path.realpath(entry.parent))
    if snapshot is None or not folder.is_relative_to(root) or not (folder / entry.name).is_symlink():
        return None
    target = folder / os.readlink(folder / entry.name)
    blob = snapshot.parent.parent / "blobs" / target.name
    leads_there = Path(os.path.realpath(target.parent)) == blob.parent
    return blob if leads_there and blob.is_file() and not blob.is_symlink() else None


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and _REPOSITORY.fullmatch(folder.parent.parent.name) is not None
