"""The manifest of a checkpoint: its step, its configuration, and the size and hash of every file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from spmdrl.checkpoint.places import step_of
from spmdrl.config.strict import Form, Malformed, conform, parse_own_json, shown

MANIFEST, STATE, COLLECTOR, TABLE = "manifest.json", "state.json", "collector.json", ".metadata"
NECESSARY = (STATE, TABLE)
_FORMAT = 1
GLANCE_BYTES = 2**20  # `glance` hashes files up to this size, which are all but those with tensors


class BrokenManifest(ValueError):
    """The manifest is missing, damaged or of another format; the message says which."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The size of a file and the hash of its content."""

    num_bytes: int
    sha256: str


class _Digest(Form):
    num_bytes: int = Field(ge=0)
    sha256: str


class _Content(Form):
    step: int = Field(ge=0)
    num_ranks: int = Field(ge=1)
    configuration: dict[str, Any]
    versions: dict[str, Any]
    metrics: dict[str, float]
    files: dict[str, _Digest]


Examine = Callable[[Path, Digest], str | None]
"""Compares a file with its digest; returns a clause about what is wrong with it, None when nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a checkpoint's manifest."""

    step: int
    num_ranks: int  # the number of ranks that wrote the checkpoint
    configuration: dict[str, Any]  # resolved: file, overrides and defaults
    versions: dict[str, Any]  # of the software
    metrics: dict[str, float]  # of the step, its evaluation included
    files: dict[str, Digest]  # by name; all files but the manifest itself

    def write(self, checkpoint: Path) -> None:
        """Write the manifest into a checkpoint's directory atomically, and wait until it is on disk."""
        content = {"format": _FORMAT} | dataclasses.asdict(self)
        unfinished = checkpoint / f"{MANIFEST}.unfinished"
        write_json(unfinished, content | {"sha256": _digest_of(content)})
        unfinished.replace(checkpoint / MANIFEST)

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read a checkpoint's manifest. Raises BrokenManifest."""
        try:
            content = parse_own_json((checkpoint / MANIFEST).read_bytes())
            digest = content.pop("sha256")
        except FileNotFoundError as error:
            raise BrokenManifest(f"{MANIFEST} is missing") from error
        except OSError as error:
            raise BrokenManifest(f"{MANIFEST} cannot be read ({error.strerror})") from error
        except (Malformed, KeyError, TypeError, AttributeError) as error:
            raise BrokenManifest(f"{MANIFEST} is truncated or was changed after it was written") from error
        if digest != _digest_of(content):
            raise BrokenManifest(f"{MANIFEST} was changed after it was written")
        if (version := content.pop("format", None)) != _FORMAT:
            raise BrokenManifest(f"{MANIFEST} has format {version}, but this version of spmdrl reads format {_FORMAT}")
        try:
            found = conform(content, _Content)
        except Malformed as error:
            raise BrokenManifest(f"{MANIFEST} {error}") from error
        if missing := [name for name in NECESSARY if name not in found.files]:
            raise BrokenManifest(f"{MANIFEST} does not name {missing[0]}, which every checkpoint has")
        if strange := [name for name in found.files if Path(name).name != name]:
            raise BrokenManifest(f"{MANIFEST} names {shown(strange[0])}, which is no file of the checkpoint")
        files = {name: Digest(**dict(digest)) for name, digest in found.files.items()}
        return cls(**{**dict(found), "files": files})

    def problems(self, checkpoint: Path, names: Iterable[str], examine: Examine) -> Iterator[str]:
        """Yield a clause for each of the named files that has changed since it was written."""
        for name in names:
            if problem := examine(checkpoint / name, self.files[name]):
                yield f"{name} {problem}"


def problems_of(checkpoint: Path, examine: Examine, *, part: int = 0, num_parts: int = 1) -> list[str]:
    """Return a clause for everything that is wrong with a checkpoint's manifest, or with one part of its files."""
    try:
        manifest = Manifest.read(checkpoint)
    except BrokenManifest as error:
        return [str(error)]
    if manifest.step != step_of(checkpoint):
        return [f"{MANIFEST} belongs to step {manifest.step}"]
    return list(manifest.problems(checkpoint, sorted(manifest.files)[part::num_parts], examine))


def compare(path: Path, expected: Digest) -> str | None:
    """Compare size and hash of a file with its digest."""
    return _problem(path, expected, max_bytes=expected.num_bytes)


def glance(path: Path, expected: Digest) -> str | None:
    """Compare the size of a file with its digest, and the hash too if the file is small."""
    return _problem(path, expected, max_bytes=GLANCE_BYTES)


def write_json(path: Path, value: Any) -> Digest:
    """Write a value and wait until it is on disk; returns the file's digest."""
    content = json.dumps(value, indent=1).encode()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Digest(len(content), hashlib.sha256(content).hexdigest())


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Keep the finite values: JSON cannot represent the others."""
    return {name: value for name, value in values.items() if value - value == 0}


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _problem(path: Path, expected: Digest, *, max_bytes: int) -> str | None:
    """Compare a file with its digest; one of more than `max_bytes` is not hashed."""
    try:
        with path.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes < expected.num_bytes:
                return f"is truncated: it has {num_bytes} of {expected.num_bytes} bytes"
            if num_bytes > expected.num_bytes:
                return f"is too long: it has {num_bytes} bytes, but {expected.num_bytes} were written"
            if num_bytes > max_bytes:
                return None
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if sha256 == expected.sha256 else "was changed after it was written"
