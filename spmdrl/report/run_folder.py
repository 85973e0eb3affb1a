"""The folder of one run: the paths of its files, and the description of a launch."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomlkit
import torch
from pydantic import BaseModel

import spmdrl
from spmdrl.config import read_table
from spmdrl.config.strict import flat, read_json, shown
from spmdrl.faults.files import PathIn
from spmdrl.faults.supervise import saved_steps
from spmdrl.faults.text import in_ranges, one_line
from spmdrl.report.files import MetricsRow, missing_steps, read_rows, read_scalars
from spmdrl.types import UserError

# What a run writes, besides the folders of its steps.
_ROWS = ("metrics.jsonl", "samples.jsonl", "eval_samples.jsonl", "worst_tokens.jsonl", "memory.jsonl", "schedule.jsonl")
_FILES = (*_ROWS, "plan.json", "versions.json", "machine.json", "error.json", "config.toml", "curves.png", "requeue")
_NUMBERED = ("launches/*.json", "ranks/rank-*.json", "logs/rank-*.log")
_FOLDERS = ("checkpoints", "tensorboard", "rollouts", "ranks", "logs", "hf", "adapter", "launches", "sinks", "judged")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run. Only `create` and `write_launch` write to disk."""

    path: Path
    config = PathIn("config.toml")
    """The resolved configuration: file, overrides and defaults."""
    plan = PathIn("plan.json")
    """Every count that follows from the configuration."""
    versions = PathIn("versions.json")
    """The software and the devices of the latest launch."""
    machine = PathIn("machine.json")
    """The processor, and the kernels that were chosen for it; a resumed run keeps them."""
    metrics = PathIn("metrics.jsonl")
    """One JSON object per step."""
    samples = PathIn("samples.jsonl")
    """A few rollouts of every step, one JSON object each."""
    eval_samples = PathIn("eval_samples.jsonl")
    """Answers to held-out prompts in each evaluation, one JSON object each; optional."""
    worst_tokens = PathIn("worst_tokens.jsonl")
    """The tokens of every step about which engine and trainer disagree most, one JSON object each."""
    memory = PathIn("memory.jsonl")
    """The memory of every rank at each switch between trainer and engine, one JSON object each; optional."""
    schedule = PathIn("schedule.jsonl")
    """The prompt groups that each engine opened and left in every step, one JSON object each; where steps may train
    on tokens of older weights."""
    tensorboard = PathIn("tensorboard")
    """TensorBoard's event files."""
    checkpoints = PathIn("checkpoints")
    """One directory per saved step."""
    rollouts = PathIn("rollouts")
    """One directory per step whose rollouts were saved; optional."""
    judged = PathIn("judged")
    """The answers of judges, in a file of each rank; optional."""
    hf = PathIn("hf")
    """The final model as a Hugging Face directory."""
    adapter = PathIn("adapter")
    """The final adapters as a PEFT directory."""
    curves = PathIn("curves.png")
    """The run as one picture."""

    @classmethod
    def of(cls, dir: str | Path, name: str, resume: str) -> RunFolder:
        """Return the folder `dir/name`. Raises UserError if it already holds a run and `resume` is "never"."""
        folder = cls(Path(dir) / name)
        if resume == "never" and folder.holds_run():
            raise UserError(
                f'resume.checkpoint = "never" but {folder.path} already holds a run; set run.name to a new name, '
                'or resume.checkpoint = "auto" to resume from its newest checkpoint'
            )
        return folder

    def create(self) -> RunFolder:
        """Create the folder if it is missing.

        All ranks may call this at once: it creates directories only. The files that mark the folder as a run come from
        `write_launch`, after a barrier.
        """
        try:
            for directory in (self.checkpoints, self.tensorboard):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"the run folder {self.path} cannot be created ({error.strerror}); set run.dir to a writable directory"
            ) from error
        return self

    def read_machine(self) -> dict[str, Any] | None:
        """Read machine.json; None when there is none. Raises UserError when it is not what `write_launch` writes."""
        if not self.machine.exists():
            return None
        try:
            return read_json(self.machine, dict[str, Any])
        except UserError as error:
            raise UserError(f"{error}; remove the file, and it is written again") from error

    def episodes(self, step: int) -> Path:
        """The episodes of a step as a page, where one was written."""
        return self.path / f"episodes-{step:08d}.html"

    def hf_after(self, step: int) -> Path:
        """The model after a step, as a Hugging Face directory."""
        return self.path / f"hf-{step:08d}"

    def adapter_after(self, step: int) -> Path:
        """The adapters after a step, as a PEFT directory."""
        return self.path / f"adapter-{step:08d}"

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each reason why a run cannot write here; leaves nothing behind.

        Links are refused where the run writes files, because it would overwrite what they lead to. Folders may be
        links: to a larger disk, say.
        """
        name = shown(self.path)
        if self.path.exists() and not self.path.is_dir():
            yield (
                f"the run's folder {name} is a file; move it away, or set run.name to a new name or run.dir to another "
                "directory"
            )
            return
        if (problem := _no_room_for(self.path)) is not None:
            yield f"the run folder {name} cannot be created ({problem}); set run.dir to a writable directory"
            return
        numbered = (file for kind in _NUMBERED for file in self.path.glob(kind))
        for file in (*(self.path / name for name in _FILES), *numbered):
            if file.is_symlink():
                yield f"{shown(file)} is a link, and the run would overwrite what it leads to; remove the link"
            elif file.exists() and not file.is_file():
                yield f"{shown(file)} is no ordinary file, and the run writes one there; remove it"
        if (self.path / "stop").is_dir():
            yield f"{shown(self.path / 'stop')} is a directory, and a file there stops the run; remove it"
        for folder in (self.path / name for name in _FOLDERS):
            if os.path.lexists(folder) and not folder.is_dir():
                yield f"{shown(folder)} is no directory, and the run writes one there; remove it"

    def content_problems(self) -> Iterator[str]:
        """Yield a sentence for each file that a run cannot continue with; of rows, the first line that is damaged."""
        try:
            self.read_machine()
        except UserError as error:
            yield str(error)
        for file in (self.path / name for name in _ROWS):
            try:
                if file == self.metrics:
                    yield from self._lost_checkpoints(read_scalars(file))
                else:
                    read_rows(file)
            except UserError as error:
                remedy = "remove that line to go on"
                yield str(error) if remedy in str(error) else f"{error}; mend the file, or move it away, to go on"

    def _lost_checkpoints(self, rows: Sequence[MetricsRow]) -> Iterator[str]:
        """Yield a sentence where a checkpoint was written and none is left: starting at step 0 would drop all rows."""
        written = [row["step"] for row in rows if "checkpoint/write_s" in row]
        if written and not saved_steps(self.checkpoints):
            yield (
                f"{shown(self.metrics)} says that a checkpoint was written by step {written[-1]}, but "
                f"{shown(self.checkpoints)} holds none; restore it, or set run.name to a new name to start at step 0"
            )

    def gap(self, step: int) -> str | None:
        """Return a clause where finished steps up to `step` have no row in metrics.jsonl. Raises UserError."""
        missing = missing_steps(read_rows(self.metrics), step)
        steps, were = ("steps", "they were") if len(missing) > 1 else ("step", "it was")
        named = one_line(in_ranges(missing))
        return f"{self.metrics.name} has no row of {steps} {named}, although {were} finished" if missing else None

    def gap_notes(self, checkpoints: Path, step: int) -> Iterator[str]:
        """Yield a note about `gap` for a run that resumes from a checkpoint; after another run's it has no rows yet."""
        if checkpoints == self.checkpoints and (gap := self.gap(step)):
            yield f"{gap}; the file was cut, or rows were removed: training is not affected, but charts have a gap"

    def holds_run(self) -> bool:
        """True when a run was launched here, even if it did not finish."""
        written = (self.config, self.metrics, self.hf)
        return any(path.exists() for path in written) or any(self.checkpoints.glob("*"))

    def require_launch(self) -> None:
        """Raise UserError where no run was launched."""
        if not self.config.is_file():
            raise UserError(f"{shown(self.path)} is not the folder of a run: it has no config.toml")

    def write_launch(self, config: BaseModel, plan: Any, machine: Mapping[str, Any]) -> None:
        """Write config.toml, plan.json (`plan` is a dataclass), machine.json and versions.json. One rank calls this.

        Settings that are None are left out, because TOML has no null.
        """
        self.config.write_text(tomlkit.dumps(config.model_dump(exclude_none=True)), encoding="utf-8")
        self.plan.write_text(json.dumps(dataclasses.asdict(plan), indent=2) + "\n", encoding="utf-8")
        self.machine.write_text(json.dumps(machine, indent=2) + "\n", encoding="utf-8")
        self.versions.write_text(json.dumps(describe_machine(), indent=2) + "\n", encoding="utf-8")


def _no_room_for(folder: Path) -> str | None:
    """Return why a directory cannot be written, or be created, by trying it in the nearest one that is there."""
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
        os.rmdir(tempfile.mkdtemp(prefix=".spmdrl-", dir=nearest))
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def describe_machine() -> dict[str, Any]:
    """Describe the software and the devices of this machine; unknown values are None."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain")
    return {
        "spmdrl": spmdrl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _installed_version("transformers"),
        "platform": platform.platform(),
        "git_commit": commit,
        "git_dirty": None if changes is None else bool(changes),
        "cuda": torch.version.cuda,
        "cuda_devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Run git on spmdrl's own checkout; None if there is no git, no checkout, or no commit yet."""
    try:
        # Without locks: what ends in the middle, at a limit of file sizes, say, must not leave one in a repository.
        command = ["git", "--no-optional-locks", "-C", str(Path(spmdrl.__file__).parent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


# A run as its folder tells of it: read by programs besides the loop, while it runs or afterwards.


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run that was launched."""

    name: str
    rows: list[MetricsRow]  # of metrics.jsonl
    settings: Mapping[str, Any]  # by their whole names, such as `optim.lr`; {} where there is no config.toml
    num_steps: int | None  # None where there is no plan.json


def read_run(path: Path) -> RecordedRun:
    """Read a run's folder. Raises UserError when it holds no run, or a file that cannot be read."""
    folder = RunFolder(path)
    if not folder.holds_run():
        raise UserError(f"{path} is not the folder of a run: it has no config.toml and no metrics.jsonl")
    return RecordedRun(
        name=Path(os.path.realpath(path)).name,
        rows=read_scalars(folder.metrics),
        settings=read_settings(folder.config),
        num_steps=read_num_steps(folder.plan),
    )


def read_steps(path: Path) -> RecordedRun:
    """Read the folder of a run that has finished a step. Raises UserError as `read_run` does, and when it has not."""
    run = read_run(path)
    if not run.rows:
        raise UserError(f"{path} has no finished step to show: its metrics.jsonl is missing or empty")
    return run


def read_settings(config: Path) -> dict[str, Any]:
    """Read the settings of a config.toml by their whole names; none where the file is missing. Raises UserError."""
    if not config.exists():
        return {}
    try:
        return {name: value for name, value in flat(read_table(str(config))) if value != {}}
    except UserError as error:
        raise UserError(f"{error}; the file is written again when the run is resumed") from error


def read_num_steps(plan: Path) -> int | None:
    """Read the steps that a run was launched for; None before its plan.json is whole."""
    try:
        steps = read_json(plan, dict[str, Any]).get("num_steps")
    except UserError:
        return None
    return steps if isinstance(steps, int) else None
