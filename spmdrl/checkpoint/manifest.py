"""The manifest: what a checkpoint consists of, who wrote it, and by which every byte of it is checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.checkpoint.places import step_of

MANIFEST = "manifest.json"
_FORMAT = 1
GLANCE_BYTES = 2**20  # what is read of a file by who only glances at it: of all but the tensors, that is everything


class BrokenManifest(ValueError):
    """The manifest is not there, or not as it was written; says which and how."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The size and the content of a file."""

    num_bytes: int
    sha256: str


Look = Callable[[Path, Digest], str | None]
"""What is wrong with a file, if anything is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its tensors."""

    step: int
    num_ranks: int  # that wrote it
    configuration: dict[str, Any]  # as it was resolved
    versions: dict[str, Any]  # of the software
    metrics: dict[str, float]  # of the step, its evaluation included
    files: dict[str, Digest]  # by name; all but the manifest itself

    def write(self, checkpoint: Path) -> None:
        """Write it into the directory of a checkpoint, onto the disk; where there is one, in its place."""
        content = {"format": _FORMAT} | dataclasses.asdict(self)
        unfinished = checkpoint / f"{MANIFEST}.unfinished"
        write_json(unfinished, content | {"sha256": _digest_of(content)})
        unfinished.replace(checkpoint / MANIFEST)

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Raises BrokenManifest."""
        try:
            content = json.loads((checkpoint / MANIFEST).read_bytes())
            digest = content.pop("sha256")
        except FileNotFoundError as error:
            raise BrokenManifest(f"{MANIFEST} is missing") from error
        except OSError as error:
            raise BrokenManifest(f"{MANIFEST} cannot be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenManifest(f"{MANIFEST} is truncated or was changed: it is not what was written") from error
        if digest != _digest_of(content):
            raise BrokenManifest(f"{MANIFEST} was changed: it is not what was written")
        if (version := content.pop("format")) != _FORMAT:
            raise BrokenManifest(f"{MANIFEST} has format {version}, and this version of spmdrl reads {_FORMAT}")
        files = {name: Digest(**digest) for name, digest in content.pop("files").items()}
        return cls(**content, files=files)

    def problems(self, checkpoint: Path, names: Iterable[str], look: Look) -> Iterator[str]:
        """A clause for each of these files that is not what it was when it was written."""
        for name in names:
            if problem := look(checkpoint / name, self.files[name]):
                yield f"{name} {problem}"


def problems_of(checkpoint: Path, look: Look, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """A clause for everything that is wrong with a checkpoint: with its manifest, and with one of several parts of its
    files."""
    try:
        manifest = Manifest.read(checkpoint)
    except BrokenManifest as error:
        return [str(error)]
    if manifest.step != step_of(checkpoint):
        return [f"{MANIFEST} is that of step {manifest.step}"]
    return list(manifest.problems(checkpoint, sorted(manifest.files)[part::num_parts], look))


def compare(path: Path, expected: Digest) -> str | None:
    """Look at every byte of a file."""
    return _problem(path, expected, max_bytes=expected.num_bytes)


def glance(path: Path, expected: Digest) -> str | None:
    """Look at the size of a file, and at every byte only of a small one."""
    return _problem(path, expected, max_bytes=GLANCE_BYTES)


def write_json(path: Path, value: Any) -> Digest:
    """Write a value, onto the disk."""
    content = json.dumps(value, indent=1).encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Digest(len(content), hashlib.sha256(content).hexdigest())


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON has a word for."""
    return {name: value for name, value in values.items() if value - value == 0}


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _problem(path: Path, expected: Digest, *, max_bytes: int) -> str | None:
    """What is wrong with a file; one of more than `max_bytes` is not read."""
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes < expected.num_bytes:
                return f"is truncated: it has {num_bytes} of {expected.num_bytes} bytes"
            if num_bytes > expected.num_bytes:
                return f"has {num_bytes} bytes, {num_bytes - expected.num_bytes} more than were written"
            if num_bytes > max_bytes:
                return None
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if sha256 == expected.sha256 else "was changed: its content is not what was written"
