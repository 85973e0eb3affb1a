"""Resuming: choose the checkpoint from which a launch continues, and read it in place, on any number of ranks."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.checkpoint.manifest import (
    BROKEN,
    COLLECTOR,
    COLUMNS,
    FIXED,
    STATE,
    TABLE,
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
    with_columns,
)
from spmdrl.checkpoint.storage import (
    FOLLOWER,
    WITHOUT_FROZEN,
    LearnerState,
    LoadPlanner,
    Reader,
    Tree,
    in_chunks,
    trained_weights,
    tree_of,
)
from spmdrl.checkpoint.write import kind_of_optimizer
from spmdrl.config import Config, OptimConfig, TuningConfig
from spmdrl.config.strict import FileModel, as_written, read_json
from spmdrl.dist.collectives import gather_objects, raise_on_all_ranks, require_same
from spmdrl.faults.failure import is_secondary
from spmdrl.learn.learner import Learner, optimizers_of
from spmdrl.model.lora.adapters import Adapters, Identity
from spmdrl.model.policy import PackedModel
from spmdrl.report.run_folder import describe_machine
from spmdrl.types import UserError

# Reading a checkpoint.


def restore(folder: Path, learners: Mapping[str, Learner], mesh: DeviceMesh, *, step: int) -> None:
    """Load the checkpoint of `step` in place. Every rank of the mesh must call this.

    Without a checkpoint of step 0, step 0 leaves the model as it was loaded. There is no random state to restore:
    every random number is a hash of its purpose. The position in the prompts is in `collector_state`.
    """
    checkpoint = folder_of(folder, step)
    if step == 0 and not checkpoint.exists():
        return
    saved = _saved_learners(checkpoint)
    refuse_other_state(folder, {name: learner.optim for name, learner in learners.items()}, step=step)
    for name, learner in learners.items():
        refuse_other_adapters(checkpoint, name, learner.model.adapters)
    states = {name: LearnerState.to_fill(learner) for name, learner in learners.items()}
    _fill(tree_of(states), checkpoint, mesh)
    for name, learner in learners.items():
        set_state_dict(
            learner.model,
            learner.optimizer,
            model_state_dict=states[name].weights,
            optim_state_dict=cast(Any, states[name].optimizer),
            options=WITHOUT_FROZEN,
        )
        learner.model.refresh()
        for of, follower in learner.followers.items():
            set_model_state_dict(follower.model, states[name].followers[of])
        if not saved[name].has_state:  # torch made up the state that was saved
            learner.optimizer.state.clear()
        _restore_numbers(learner, saved[name])


def restore_weights(checkpoint: Path, model: PackedModel, mesh: DeviceMesh, *, name: str) -> None:
    """Load only the weights of one learner; every rank of the mesh must call this."""
    refuse_other_adapters(checkpoint, name, model.adapters)
    weights = trained_weights(model)
    _fill({name: {"weights": weights}}, checkpoint, mesh)
    set_model_state_dict(model, weights, options=WITHOUT_FROZEN)
    model.refresh()


def _fill(tree: Tree, checkpoint: Path, mesh: DeviceMesh) -> None:
    """Load into the tensors of a tree. Raises UserError on every rank if the checkpoint belongs to another model."""
    with raise_on_all_ranks(mesh):
        table = _table_of(checkpoint)
        for learner, part in ((name, part) for name, parts in tree.items() for part in parts):
            if part.startswith(FOLLOWER) and not any(
                x.startswith(f"{learner}.{part}.") for x in table.state_dict_metadata
            ):
                raise UserError(
                    f"{checkpoint} has no weights of [models.{part.removeprefix(FOLLOWER)}], which follows the policy; "
                    "remove that table, or start a new run from the exported model"
                )
        differences = [sentence for name, parts in tree.items() for sentence in _differences(name, parts, table)]
        if differences:
            more = f", and {len(differences) - 1} others differ" if len(differences) > 1 else ""
            raise UserError(
                f"{checkpoint} belongs to another model: {differences[0]}{more}; set model.path to the model that it "
                "was trained from"
            )
    try:
        dcp.load(
            in_chunks(tree),
            storage_reader=Reader(checkpoint),
            planner=LoadPlanner(),
            process_group=mesh.get_group(),
        )
    except CheckpointException as error:  # a BaseException of torch: nothing else would catch and report it
        causes = [cause for cause, _ in error.failures.values()]
        if any(map(is_secondary, causes)):
            raise RuntimeError(f"{checkpoint} cannot be loaded: {error}") from None
        reason = f"{type(causes[0]).__name__}: {str(causes[0]).partition('. ')[0]}"
        raise UserError(
            f"{checkpoint} cannot be loaded: its tensors are not what a run writes ({reason}); restore it, or set "
            "resume.checkpoint to another"
        ) from None


def _table_of(checkpoint: Path) -> Metadata:
    try:
        with as_written(checkpoint / TABLE, "a run"):
            return Reader(checkpoint).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{checkpoint} cannot be loaded: {error}") from error


def _differences(learner: str, parts: Mapping[str, Any], table: Metadata) -> Iterator[str]:
    """Yield a clause for each weight of a learner, and of its followers, that differs in shape, or is only in the model
    or the checkpoint."""
    for part in parts:
        if part == "weights" or part.startswith(FOLLOWER):
            yield from _different(f"{learner}.{part}.", parts[part], table)


def _different(prefix: str, weights: Mapping[str, Any], table: Metadata) -> Iterator[str]:
    saved = {
        name.removeprefix(prefix): list(entry.size)
        for name, entry in table.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    now = {name: list(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(saved.keys() | now.keys()):
        if (before := saved.get(name, "absent")) != (wanted := now.get(name, "absent")):
            yield f"{name} is {before} in the checkpoint and {wanted} in this run"


def refuse_other_state(folder: Path, optimizers: Mapping[str, OptimConfig], *, step: int) -> None:
    """Raise UserError if a checkpoint holds other learners than these, or other kinds of optimizers."""
    saved = _saved_learners(folder_of(folder, step))
    if saved.keys() != optimizers.keys():
        raise UserError(
            f"the checkpoint of step {step} holds {' and '.join(saved) or 'no learner'}, but this run trains "
            f"{' and '.join(optimizers)}; set advantage.estimator back, or start a new run from the exported model"
        )
    for name, optim in optimizers.items():
        if (before := saved[name].optimizer) != (now := kind_of_optimizer(optim)):
            raise UserError(
                f"the checkpoint of step {step} holds the state of optim.name = {before}, but now it is {now}; "
                "set it back, or start a new run from the exported model"
            )


class _SavedLossScale(FileModel):
    scale: float = Field(gt=0.0, allow_inf_nan=False)
    dynamic: bool
    growth_interval: int
    good_updates: int


class _SavedAdapters(FileModel):
    """An `Identity`."""

    base: str
    matrices: str
    rank: int
    alpha: float
    rslora: bool
    init: str = "default"


class _SavedLearner(FileModel):
    optimizer: str
    has_state: bool
    loss_scale: _SavedLossScale
    coefficients: dict[str, float]
    adapters: _SavedAdapters | None = None


class _State(FileModel):
    learners: dict[str, _SavedLearner]


def refuse_other_adapters(checkpoint: Path, name: str, adapters: Adapters | None) -> None:
    """Raise UserError if a learner's checkpoint holds other adapters than these; None: the learner has none."""
    saved = _saved_learners(checkpoint)[name].adapters
    before = None if saved is None else Identity(**saved.model_dump())
    now = None if adapters is None else adapters.identity
    if before == now:
        return
    if before is None or now is None:
        had, trained, change = ("no adapters", "some", "remove") if before is None else ("adapters", "none", "add")
        problem = f"{had}, and this run trains {trained}; {change} [lora], or start a new run from an exported model"
    elif before.base != now.base:
        problem = (
            "adapters of another base: the weights in model.path are not those that they were trained on; set "
            "model.path to the directory with those"
        )
    else:
        other = "other layers" if str(before) == str(now) else str(now)
        problem = (
            f"adapters of {before}, and those of this run are of {other}; set [lora] back, and what lora.path names, "
            "or start a new run with lora.path"
        )
    raise UserError(f"{checkpoint} holds {problem}")


def _saved_learners(checkpoint: Path) -> dict[str, _SavedLearner]:
    """Read the state of the learners other than tensors."""
    return read_json(checkpoint / STATE, _State).learners


def _restore_numbers(learner: Learner, saved: _SavedLearner) -> None:
    learner.loss_scale.scale = saved.loss_scale.scale
    learner.loss_scale.good_updates = saved.loss_scale.good_updates
    # Only coefficients that this launch adapts: one that is fixed now comes from the configuration.
    learner.coefficients.update({name: saved.coefficients.get(name, x) for name, x in learner.coefficients.items()})


def collector_state(folder: Path, *, step: int) -> dict[str, Any] | None:
    """Read the collector's state that was saved after `step`; None if there is none, as at the start of a run."""
    path = folder_of(folder, step) / COLLECTOR
    if not path.exists():
        return None
    # It may hold every token of many groups, and its digest has been compared with the manifest's.
    saved, columns = dict(read_json(path, _SavedCollector, max_bytes=sys.maxsize)), path.with_name(COLUMNS)
    with as_written(path, "a run"):
        found: dict[str, Any] = with_columns(saved, columns.read_bytes() if columns.exists() else b"")
    return found


class _SavedCollector(FileModel):
    cursor: int = Field(ge=0)
    sampling: dict[str, Any]
    carried: list[dict[str, Any]]
    ahead: dict[str, Any] | None = None  # rollouts of the next step, which engines had sampled
    curriculum: dict[str, Any] = Field(default_factory=dict)


# The choice of the checkpoint from which a launch continues.


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
        """True when the checkpoint has the step's evaluation: a run that stops on request skips it."""
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
