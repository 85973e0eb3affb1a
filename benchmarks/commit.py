"""Name the code of a working copy, also where there is no git: `python -m benchmarks.commit` prints a stamp.

`launch/make_bundle.sh` puts the stamp into the bundle, where there is git; where there is none, a digest of the sources
tells whether they are still those of the stamp's commit. Needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGED = " with changes"
_RESULTS = (":!benchmarks/results", ":!docs/gen/*.json")
_SOURCES = ("spmdrl/**/*.py", "tests/**/*.py", "benchmarks/*.py", "launch/*", "configs/*.toml")


def stamp(root: Path) -> dict[str, str]:
    """Return the commit of a working copy and the sha256 of its sources."""
    return {"commit": commit_from_git(root) or "unknown", "sources": sources_digest(root)}


def commit_id(root: Path, stamp_file: Path | None) -> str:
    """Name the commit of a working copy, marked when files differ from it; "unknown" with neither git nor stamp."""
    if found := commit_from_git(root):
        return found
    if stamp_file is None or not stamp_file.is_file():
        return "unknown"
    try:
        stamped = json.loads(stamp_file.read_text(encoding="utf-8"))
        commit, sources = str(stamped["commit"]), stamped["sources"]
    except (ValueError, LookupError, TypeError):  # cut off, or not a stamp
        return "unknown"
    return commit if sources == sources_digest(root) else commit.removesuffix(CHANGED) + CHANGED


def commit_from_git(root: Path) -> str | None:
    """Name the commit that git knows, marked when files other than results differ; None outside of a checkout."""
    top = _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():  # a copy that lies in another repository
        return None
    changes = _git(root, "status", "--porcelain", "--", ".", *_RESULTS)
    return f"{_git(root, 'rev-parse', 'HEAD')}{CHANGED if changes else ''}"


def sources_digest(root: Path) -> str:
    """Return the sha256 of the names and contents of everything that a proof runs."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _SOURCES for path in root.glob(pattern) if path.is_file()}):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git prints; None where it fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    print(json.dumps(stamp(ROOT)))
