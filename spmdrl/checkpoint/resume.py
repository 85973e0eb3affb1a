"""Which checkpoint a launch goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.checkpoint.changes import changes, harmless
from spmdrl.checkpoint.manifest import Manifest, compare, glance, problems_of
from spmdrl.checkpoint.places import BROKEN, folder_of, leftovers, rename, saved_steps, step_of
from spmdrl.checkpoint.restore import refuse_other_state
from spmdrl.config import Config, SftConfig
from spmdrl.dist.collectives import gather_objects, require_same
from spmdrl.learn.learners import optimizers_of
from spmdrl.report.run_folder import describe_machine
from spmdrl.types import UserError


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a launch begins; the same on every rank."""

    folder: Path  # of checkpoints
    step: int  # 0: the model as it is loaded
    notes: tuple[str, ...] = ()  # for the user
    metrics: Mapping[str, float] | None = None  # of the step, as they were saved; None where the run begins

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint; None where the run begins."""
        return None if self.metrics is None else self.step

    @property
    def is_evaluated(self) -> bool:
        """Whether the evaluation of the step was made before it was saved: a run that is told to stop may owe it."""
        return any(name.startswith("eval/") for name in self.metrics or ())


Examine = Callable[[Path], list[str]]
"""A clause for everything that is wrong with a checkpoint."""


def find_resume_point(cfg: Config | SftConfig, checkpoints: Path, mesh: DeviceMesh) -> ResumePoint:
    """What `[resume]` chooses; every rank of the mesh must call this.

    All files of the checkpoint have been compared with its manifest, a part of them by each rank. Raises UserError when
    there are checkpoints but none may be loaded, and when the configuration has changed in what is not harmless.
    """
    require_same(mesh, saved_steps(checkpoints), f"the list of checkpoints in {checkpoints}")
    origin, broken = _choose(cfg, checkpoints, lambda checkpoint: _problems(checkpoint, mesh))
    if broken:
        _set_aside(origin.folder, broken, mesh)
    return origin


def foresee_resume_point(cfg: Config | SftConfig, checkpoints: Path) -> ResumePoint:
    """What `find_resume_point` will choose or refuse, found by one process that changes nothing.

    Files with tensors are compared with the manifest by their names and sizes only.
    """
    origin, _ = _choose(cfg, checkpoints, lambda checkpoint: problems_of(checkpoint, glance))
    return origin


def require_whole(checkpoint: Path, mesh: DeviceMesh, *, remedy: str) -> None:
    """Raise UserError where a checkpoint is not as it was written; every rank of the mesh must call this."""
    if problems := _problems(checkpoint, mesh):
        raise UserError(f"{checkpoint} cannot be loaded: {', '.join(problems)}; {remedy}")


def _choose(cfg: Config | SftConfig, checkpoints: Path, examine: Examine) -> tuple[ResumePoint, list[int]]:
    """Where `[resume]` begins, and the steps of the newer checkpoints that are passed over."""
    folder, steps, remedy = checkpoints, saved_steps(checkpoints), "set run.name to a new name to start at step 0"
    if not steps and cfg.resume.checkpoint not in ("auto", "never"):
        folder, steps = _named(cfg.resume.checkpoint)
        remedy = "set resume.checkpoint to another"
    if not steps:
        return ResumePoint(checkpoints, 0, tuple(unfinished(checkpoints, 0))), []
    step, broken = _newest_whole(folder, steps, examine)
    if step is None or (broken and not cfg.resume.allow_older):
        raise UserError("\n".join(_refusal(folder, steps, examine, remedy)))
    manifest = Manifest.read(folder_of(folder, step))
    changed = list(_changed(cfg, manifest))
    refuse_other_state(folder, optimizers_of(cfg), step=step)
    notes = [
        *unfinished(checkpoints, step),
        *changed,
        *_other_versions(manifest),
        *(f"{sentence}; set aside as {BROKEN[1:]}, going on from step {step}" for sentence in broken.values()),
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
    """A note on what a kill has left of checkpoints, when a run begins at `step`: it never had the name of one."""
    if names := [path.name for path in leftovers(checkpoints)]:
        yield f"the launch before was stopped while it wrote or removed {', '.join(names)}; going on from step {step}"


def _newest_whole(folder: Path, steps: list[int], examine: Examine) -> tuple[int | None, dict[int, str]]:
    """The newest checkpoint that is whole, if there is one, and what is wrong with each newer one."""
    broken: dict[int, str] = {}
    for step in reversed(steps):
        problems = examine(folder_of(folder, step))
        if not problems:
            return step, broken
        broken[step] = f"{folder_of(folder, step).name}: {', '.join(problems)}"
    return None, broken


def _problems(checkpoint: Path, mesh: DeviceMesh) -> list[str]:
    """A clause for everything that is wrong with a checkpoint; every rank looks at a part of it."""
    found = problems_of(checkpoint, compare, part=mesh.get_local_rank(), num_parts=mesh.size())
    everyones = gather_objects(mesh, found)
    return sorted({problem for problems in everyones for problem in problems})


def _refusal(folder: Path, steps: list[int], examine: Examine, remedy: str) -> Iterator[str]:
    """Why nothing is loaded, a line each; looks at every checkpoint, so that the user learns of all at once."""
    problems = {step: examine(folder_of(folder, step)) for step in reversed(steps)}
    for step, found in problems.items():
        if found:
            yield f"{folder_of(folder, step)}: {', '.join(found)}"
    whole = [step for step, found in problems.items() if not found]
    yield (
        f"the newest checkpoint cannot be loaded; bring it back, or set resume.allow_older = true to go on from step "
        f"{whole[0]}, which is whole"
        if whole
        else f"no checkpoint can be loaded; bring one back, or {remedy}"
    )


def _set_aside(folder: Path, steps: list[int], mesh: DeviceMesh) -> None:
    """Rename what was passed over: nothing is deleted, and the next launch does not meet it again."""
    gather_objects(mesh, None)  # every rank has looked at it
    if mesh.get_local_rank() == 0:
        for step in steps:
            rename(folder_of(folder, step), BROKEN)
    gather_objects(mesh, None)


def _changed(cfg: Config | SftConfig, manifest: Manifest) -> Iterator[str]:
    """A note on harmless changes. Raises UserError for others that `resume.changed` does not name."""
    found = changes(manifest.configuration, cfg)
    told = [change for change in found if not change.is_in(("resume", "run.name", "run.dir"))]
    unnamed = [change for change in found if not change.is_in((*harmless(cfg), *cfg.resume.changed))]
    if unnamed:
        names = ", ".join(f'"{change.name}"' for change in unnamed)
        raise UserError(
            f"since the checkpoint of step {manifest.step}, {'; '.join(change.sentence for change in unnamed)}; set "
            f"that back, or go on with the change: resume.changed = [{names}]"
        )
    if told:
        yield f"changed since step {manifest.step}: {'; '.join(change.sentence for change in told)}"


def _other_versions(manifest: Manifest) -> Iterator[str]:
    """Notes on what computes otherwise than it did."""
    now = describe_machine()
    for name in ("spmdrl", "torch", "transformers"):
        if (before := manifest.versions.get(name)) != now[name]:
            yield f"step {manifest.step} was saved with {name} {before}, and this is {now[name]}"
