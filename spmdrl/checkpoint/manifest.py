"""The manifest of a checkpoint: its step, its configuration, and the size and hash of every file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from spmdrl.config.model import FrozenModelConfig
from spmdrl.config.strict import FileModel, Malformed, conform, flat, parse_own_json, shown
from spmdrl.faults.files import open_ordinary
from spmdrl.faults.supervise import newest_step as newest_step
from spmdrl.faults.supervise import saved_steps as saved_steps
from spmdrl.faults.supervise import step_of as step_of

# Names of checkpoints in a run's folder.
#
# `step-00000012` is complete (`faults/supervise.py`). Other names have a suffix: `unfinished` was being written,
# `removed` was being deleted, `broken` was skipped when the run resumed from an older one.


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
    """Delete a checkpoint; if this is interrupted, nothing is left that passes for complete."""
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


MANIFEST, STATE, COLLECTOR, TABLE = "manifest.json", "state.json", "collector.json", ".metadata"
COLUMNS = "collector.columns"
NECESSARY = (STATE, TABLE)
_COLUMN, _COLUMN_CODES, _COLUMN_LENGTH = "__column__", {int: "i", float: "f"}, 16
_FORMAT = 1
GLANCE_BYTES = 2**20  # `glance` hashes files up to this size, which are all but those with tensors


class BrokenManifest(ValueError):
    """The manifest is missing, damaged or of another format; the message says which."""


class Digest(FileModel):
    """The size of a file and the hash of its content."""

    num_bytes: int = Field(ge=0)
    sha256: str


Examine = Callable[[Path, Digest], str | None]
"""Compares a file with its digest; returns a clause about what is wrong with it, None when nothing is."""


class Manifest(FileModel):
    """The content of a checkpoint's manifest."""

    step: int = Field(ge=0)
    num_ranks: int = Field(ge=1)  # the number of ranks that wrote the checkpoint
    configuration: dict[str, Any]  # resolved: file, overrides and defaults
    versions: dict[str, Any]  # of the software
    metrics: dict[str, float]  # of the step, its evaluation included
    files: dict[str, Digest]  # by name; all files but the manifest itself

    def write(self, checkpoint: Path) -> None:
        """Write the manifest into a checkpoint's directory atomically, and wait until it is on disk."""
        content = {"format": _FORMAT} | self.model_dump()
        unfinished = checkpoint / f"{MANIFEST}.unfinished"
        write_json(unfinished, content | {"sha256": _digest_of(content)})
        unfinished.replace(checkpoint / MANIFEST)

    @classmethod
    def read(cls, checkpoint: Path) -> Manifest:
        """Read a checkpoint's manifest. Raises BrokenManifest."""
        try:
            with open_ordinary(checkpoint / MANIFEST) as file:
                content = parse_own_json(file.read())
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
            found = conform(content, cls)
        except Malformed as error:
            raise BrokenManifest(f"{MANIFEST} {error}") from error
        if missing := [name for name in NECESSARY if name not in found.files]:
            raise BrokenManifest(f"{MANIFEST} does not name {missing[0]}, which every checkpoint has")
        if strange := [name for name in found.files if Path(name).name != name]:
            raise BrokenManifest(f"{MANIFEST} names {shown(strange[0])}, which is no file of the checkpoint")
        return found

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


def without_columns(value: Any, columns: bytearray) -> Any:
    """Replace long lists of numbers in a value of JSON's types by their place in `columns`, to which their numbers are
    added: those of tokens, 4 bytes each."""
    if isinstance(value, Mapping):
        return {key: without_columns(one, columns) for key, one in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    kinds = {type(one) for one in value}
    if len(value) >= _COLUMN_LENGTH and len(kinds) == 1 and (code := _COLUMN_CODES.get(kinds.pop())) is not None:
        with contextlib.suppress(OverflowError):
            column = array(code, value)
            if column.tolist() == list(value):  # a float that is not one of 32 bits stays where it is
                columns += column.tobytes()
                return {_COLUMN: [code, len(columns) // column.itemsize - len(column), len(column)]}
    return [without_columns(one, columns) for one in value]


def with_columns(value: Any, columns: bytes) -> Any:
    """Undo `without_columns`. Raises ValueError where there is no such place."""
    if isinstance(value, list):
        return [with_columns(one, columns) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {_COLUMN}:
        return {key: with_columns(one, columns) for key, one in value.items()}
    code, start, count = value[_COLUMN]
    if code not in _COLUMN_CODES.values() or not 0 <= start <= start + count <= len(columns) // 4:
        raise ValueError(f"no column at {value[_COLUMN]}")
    return array(code, columns[4 * start : 4 * (start + count)]).tolist()


def write_json(path: Path, value: Any) -> Digest:
    """Write a value and wait until it is on disk; returns the file's digest."""
    return write_bytes(path, json.dumps(value, indent=1).encode())


def write_bytes(path: Path, content: bytes) -> Digest:
    """Write a file and wait until it is on disk; returns its digest."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return Digest(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Keep the finite values: JSON cannot represent the others."""
    return {name: value for name, value in values.items() if value - value == 0}


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _problem(path: Path, expected: Digest, *, max_bytes: int) -> str | None:
    """Compare a file with its digest; one of more than `max_bytes` is not hashed."""
    try:
        with open_ordinary(path) as file:
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


# Retention: choose the checkpoints to delete.


def superseded(metric: Mapping[int, float | None], *, keep_last: int, keep_every: int = 0) -> list[int]:
    """Return the steps whose checkpoints can be deleted, oldest first.

    `metric` maps the step of every checkpoint to its value of the metric `checkpoint.keep_best`, None where that was
    not measured. Retained are the last `keep_last`, every `keep_every`-th step except step 0 (0: none), and the one
    with the highest value, the first of equal ones.
    """
    steps = sorted(metric)
    retained = set(steps[-keep_last:])
    if keep_every:
        retained |= {step for step in steps if step and step % keep_every == 0}
    measured = {step: value for step in steps if (value := metric[step]) is not None}
    if measured:
        retained.add(max(measured, key=lambda step: (measured[step], -step)))
    return [step for step in steps if step not in retained]


# Changes of the configuration since a checkpoint was saved, and which of them are harmless.


# Settings and whole tables that may change when a run resumes: they decide where, for how long, on which devices and
# how fast it runs, but not what it computes, up to the order of floating-point sums.
HARMLESS = (
    "run.name",
    "run.dir",
    "run.num_steps",
    "run.patience_minutes",
    "run.stop_before",
    "run.threads_per_rank",
    "model.gradient_checkpointing",
    "model.checkpoint_every_layers",
    "model.reshard_after_forward",
    "model.prefetch_layers",
    "model.logits_chunk_tokens",
    "model.cpu_offload",
    "parallel",
    "rollout.num_ranks",
    "rollout.max_running",
    "rollout.tp_size",
    "rollout.memory_fraction",
    "rollout.max_kv_tokens",
    "rollout.chunked_prefill_tokens",
    "rollout.allow_untested",
    "rollout.cuda_graphs",
    "rollout.restart_engine",
    "refit",
    "offload",
    "reward.num_workers",
    "mismatch",
    "optim.state_on_host",
    "pack",
    "eval.every",
    "eval.samples_per_prompt",
    "eval.temperature",
    "eval.top_p",
    "eval.max_response_tokens",
    "eval.success_at",
    "checkpoint",
    "export",
    "resume",
    "report",
    "watchdog",
    "debug",
)

# Settings that say which weights a checkpoint holds. With others its numbers would belong to other weights.
FIXED = ("model.freeze", "lora.rank", "lora.alpha", "lora.rslora", "lora.targets", "lora.init", "lora.base")

# Shown with changes that have no effect, which may surprise the user.
_FROM_CHECKPOINT = " (the weights still come from the checkpoint; set a new run.name to start from other weights)"
_OF_ADAPTERS = " (the adapters still come from the checkpoint, and the base must be the one that they were trained on)"


@dataclass(frozen=True, slots=True)
class Change:
    """A setting whose value has changed."""

    name: str  # dotted
    sentence: str  # the old and the new value

    def is_in(self, names: Sequence[str]) -> bool:
        """True when the setting, or a table that contains it, is among `names`."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


def resolved(cfg: BaseModel) -> dict[str, Any]:
    """Convert a configuration to the form in manifests: JSON types, without unset values."""
    return cfg.model_dump(mode="json", exclude_none=True)


def changes(before: Mapping[str, Any], cfg: BaseModel) -> list[Change]:
    """List the settings that differ from those a checkpoint was saved with, sorted by name.

    A setting that an older spmdrl did not know, so that the checkpoint lacks it, is compared with its default.
    """
    old, now = _compared(before), _compared(resolved(cfg))
    chosen = dict(flat(cfg.model_dump(mode="json", exclude_none=True, exclude_defaults=True)))
    from_model = _FROM_CHECKPOINT if getattr(cfg, "lora", None) is None else _OF_ADAPTERS
    meaning = {"model.path": from_model, "lora.path": _OF_ADAPTERS, "critic.path": _FROM_CHECKPOINT}
    names = [name for name in sorted(old.keys() | now.keys()) if name in old or name in chosen]
    return [
        Change(name, f"{name} was {_shown(old, name)} and is {_shown(now, name)}{meaning.get(name, '')}")
        for name in names
        if old.get(name) != now.get(name)
    ]


def harmless(cfg: Any) -> tuple[str, ...]:
    """Return the settings of `HARMLESS` that are harmless under this configuration, and where other models lie."""
    # Every schedule but a constant one depends on the number of steps.
    names = HARMLESS if cfg.optim.schedule == "constant" else [name for name in HARMLESS if name != "run.num_steps"]
    return *names, *(f"models.{name}.{one}" for name in cfg.frozen_models for one in FrozenModelConfig.model_fields)


def _compared(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """The settings by their dotted names; rows of reward models without where these lie, which changes no score."""
    found = dict(flat(configuration))
    if "reward.terms" in found:
        found["reward.terms"] = [
            {name: value for name, value in row.items() if name not in FrozenModelConfig.model_fields}
            for row in found["reward.terms"]
        ]
    return found


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "not set"
