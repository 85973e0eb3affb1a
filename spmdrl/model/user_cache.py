"""The user's cache, which outlives every run: what this machine compiled and measured. It needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def users_cache() -> Path:
    """Return the folder, which need not be there. A user whom the system does not know has the home /."""
    home = Path(os.path.expanduser("~"))
    return Path(os.environ.get("XDG_CACHE_HOME") or (home if home.is_absolute() else Path("/")) / ".cache") / "spmdrl"


def place_torchs_cache() -> None:
    """Let torch keep what its compiler makes in the user's cache, where that can be written; variables win.

    As it is imported, the compiler makes a folder of a name that everybody knows in the folder for temporary files,
    where it stays, and where another user may have made it first.
    """
    folder = users_cache().absolute() / "torch"
    made = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if made.is_dir() and os.access(made, os.W_OK | os.X_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
