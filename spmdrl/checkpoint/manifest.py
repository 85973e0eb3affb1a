"""The manifest: what a checkpoint consists of, who wrote it, and by which every byte of it is checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_FORMAT = 1


class BrokenManifest(ValueError):
    """The manifest is not there, or not as it was written; says which and how."""


@dataclass(frozen=True, slots=True)
class Digest:
    """The size and the content of a file."""

    num_bytes: int
    sha256: str


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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrokenManifest(f"{MANIFEST} is truncated or was changed: it is not what was written") from error
        if digest != _digest_of(content):
            raise BrokenManifest(f"{MANIFEST} was changed: it is not what was written")
        if (version := content.pop("format")) != _FORMAT:
            raise BrokenManifest(f"{MANIFEST} has format {version}, and this version of spmdrl reads {_FORMAT}")
        files = {name: Digest(**digest) for name, digest in content.pop("files").items()}
        return cls(**content, files=files)

    def problems(self, checkpoint: Path, names: Iterable[str]) -> Iterator[str]:
        """A clause for each of these files that is not what it was when it was written; reads all of them."""
        for name in names:
            if problem := _problem(checkpoint / name, self.files[name]):
                yield f"{name} {problem}"


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


def _problem(path: Path, expected: Digest) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes < expected.num_bytes:
            return f"is truncated: it has {num_bytes} of {expected.num_bytes} bytes"
        if num_bytes > expected.num_bytes:
            return f"has {num_bytes} bytes, {num_bytes - expected.num_bytes} more than were written"
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if sha256 == expected.sha256 else "was changed: its content is not what was written"
