"""Resuming: choose the checkpoint from which a launch continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.checkpoint.manifest import (
    BROKEN,
    FIXED,
    Manifest,
    changes,
    compare,
    folder_of,
    glance,
    harmless,
    leftovers,
    problems_of,
    rename,
    saved_steps,
    step_of,
)
from spmdrl.checkpoint.restore import refuse_other_state
from spmdrl.config import Config, TuningConfig
from spmdrl.dist.collectives import gather_objects, require_same
from spmdrl.learn.learner import optimizers_of
from spmdrl.report.run_folder import describe_machine
from spmdrl.types import UserError


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point from which a launch continues; the same on every rank."""

    folder: Path  # that holds the checkpoints
    step: int  # 0: the model as it is loaded
    notes: tuple[str, ...] = ()  # for the user
    metrics: Mapping[str, float] | None = None  # saved with the step; None at the start of a run

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint; None at the start of a run."""
        return None if self.metrics is None else self.step

    @property
    def is_evaluated(self) -> bool:
        """True when the step was evaluated before it was saved: a run that stops on request skips the evaluation."""
        return any(name.startswith("eval/") for name in self.metrics or ())


_MAX_SHOWN = 5  # problems of a checkpoint; it may have a file for each of thousands of ranks

FindProblems = Callable[[Path], list[str]]
"""Returns a clause for everything that is wrong with a checkpoint."""


def find_resume_point(cfg: Config | TuningConfig, checkpoints: Path, mesh: DeviceMesh) -> ResumePoint:
    """Choose where to resume, as `[resume]` says; every rank of the mesh must call this.

    All files of the chosen checkpoint are compared with its manifest, a part of them by each rank. Raises UserError if
    there are checkpoints but none can be loaded, and if the configuration has changed in a way that is not harmless.
    """
    require_same(mesh, saved_steps(checkpoints), f"the list of checkpoints in {checkpoints}")
    origin, broken = _choose(cfg, checkpoints, lambda checkpoint: _problems(checkpoint, mesh))
    if broken:
        _set_aside(origin.folder, broken, mesh)
    return origin


def preview_resume_point(cfg: Config | TuningConfig, checkpoints: Path) -> ResumePoint:
    """Predict the choice of `find_resume_point`, or its error, in one process and without changing anything.

    Of files with tensors only names and sizes are compared with the manifest.
    """
    origin, _ = _choose(cfg, checkpoints, lambda checkpoint: problems_of(checkpoint, glance))
    return origin


def require_whole(checkpoint: Path, mesh: DeviceMesh, *, remedy: str) -> None:
    """Raise UserError if a checkpoint has changed since it was written; every rank of the mesh must call this."""
    if problems := _problems(checkpoint, mesh):
        raise UserError(f"{checkpoint} cannot be loaded: {_listed(problems)}; {remedy}")


def _choose(
    cfg: Config | TuningConfig, checkpoints: Path, find_problems: FindProblems
) -> tuple[ResumePoint, list[int]]:
    """Return where to resume, and the steps of the broken newer checkpoints that are skipped."""
    folder, steps, remedy = checkpoints, saved_steps(checkpoints), "set run.name to a new name to start at step 0"
    if not steps and cfg.resume.checkpoint not in ("auto", "never"):
        folder, steps = _named(cfg.resume.checkpoint)
        remedy = "set resume.checkpoint to another"
    if not steps:
        return ResumePoint(checkpoints, 0, tuple(unfinished(checkpoints, 0))), []
    step, broken = _newest_complete(folder, steps, find_problems)
    if step is None or (broken and not cfg.resume.allow_older):
        raise UserError("\n".join(_refusal(folder, steps, find_problems, remedy)))
    manifest = Manifest.read(folder_of(folder, step))
    changed = list(_changed(cfg, manifest))
    refuse_other_state(folder, optimizers_of(cfg), step=step)
    notes = [
        *unfinished(checkpoints, step),
        *changed,
        *_other_versions(manifest),
        *(f"{sentence}; renamed to {BROKEN[1:]}, resuming from step {step}" for sentence in broken.values()),
    ]
    return ResumePoint(folder, step, tuple(notes), manifest.metrics), list(broken)


def _named(path: str) -> tuple[Path, list[int]]:
    step = step_of(Path(path))
    if step is None or not Path(path).is_dir():
        raise UserError(
            f'resume.checkpoint = "{path}" is not a checkpoint; set it to "auto", "never", or a directory such as '
            "runs/NAME/checkpoints/step-00000010"
        )
    return Path(path).parent, [step]


def unfinished(checkpoints: Path, step: int) -> Iterator[str]:
    """Yield a note about checkpoints that a killed launch left incomplete, for a run that begins at `step`."""
    if names := [path.name for path in leftovers(checkpoints)]:
        yield f"the previous launch was killed while writing or deleting {', '.join(names)}; resuming from step {step}"


def _newest_complete(folder: Path, steps: list[int], find_problems: FindProblems) -> tuple[int | None, dict[int, str]]:
    """Return the step of the newest complete checkpoint, if any, and a sentence about each newer one."""
    broken: dict[int, str] = {}
    for step in reversed(steps):
        problems = find_problems(folder_of(folder, step))
        if not problems:
            return step, broken
        broken[step] = f"{folder_of(folder, step).name}: {_listed(problems)}"
    return None, broken


def _problems(checkpoint: Path, mesh: DeviceMesh) -> list[str]:
    """Return a clause for everything that is wrong with a checkpoint; each rank examines a part of its files."""
    found = problems_of(checkpoint, compare, part=mesh.get_local_rank(), num_parts=mesh.size())
    of_all_ranks = gather_objects(mesh, found)
    return sorted({problem for problems in of_all_ranks for problem in problems})


def _listed(problems: Sequence[str]) -> str:
    """Name the first problems, and count the others."""
    more = len(problems) - _MAX_SHOWN
    return ", ".join([*problems[:_MAX_SHOWN], *([f"and {more:,} more"] if more > 0 else [])])


def _refusal(folder: Path, steps: list[int], find_problems: FindProblems, remedy: str) -> Iterator[str]:
    """Yield the reasons why nothing is loaded, a line each; examines every checkpoint to show all problems at once."""
    problems = {step: find_problems(folder_of(folder, step)) for step in reversed(steps)}
    for step, found in problems.items():
        if found:
            yield f"{folder_of(folder, step)}: {_listed(found)}"
    complete = [step for step, found in problems.items() if not found]
    yield (
        f"the newest checkpoint cannot be loaded; restore it, or set resume.allow_older = true to resume from step "
        f"{complete[0]}, which is complete"
        if complete
        else f"no checkpoint can be loaded; restore one, or {remedy}"
    )


def _set_aside(folder: Path, steps: list[int], mesh: DeviceMesh) -> None:
    """Rename the skipped checkpoints: nothing is deleted, and the next launch does not try them again."""
    gather_objects(mesh, None)  # wait until every rank has examined them
    if mesh.get_local_rank() == 0:
        for step in steps:
            rename(folder_of(folder, step), BROKEN)
    gather_objects(mesh, None)


def _changed(cfg: Config | TuningConfig, manifest: Manifest) -> Iterator[str]:
    """Yield a note about harmless changes. Raises UserError for other changes that `resume.changed` does not name."""
    found = changes(manifest.configuration, cfg)
    shown = [change for change in found if not change.is_in(("resume", "run.name", "run.dir"))]
    refused = [change for change in found if not change.is_in((*harmless(cfg), *cfg.resume.changed))]
    if fixed := [change for change in found if change.is_in(FIXED)]:
        raise UserError(
            f"since the checkpoint of step {manifest.step}, {'; '.join(change.sentence for change in fixed)}, but its "
            "adapters cannot become others; set this back, or start a new run, with lora.path for what was learned"
        )
    if refused:
        names = ", ".join(f'"{change.name}"' for change in refused)
        raise UserError(
            f"since the checkpoint of step {manifest.step}, {'; '.join(change.sentence for change in refused)}; set "
            f"this back, or set resume.changed = [{names}] to resume with the change"
        )
    if shown:
        yield f"changed since step {manifest.step}: {'; '.join(change.sentence for change in shown)}"


def _other_versions(manifest: Manifest) -> Iterator[str]:
    """Yield notes about software whose version has changed since the checkpoint."""
    now = describe_machine()
    for name in ("spmdrl", "torch", "transformers"):
        if (before := manifest.versions.get(name)) != now[name]:
            yield f"step {manifest.step} was saved with {name} {before}, this is {name} {now[name]}"
