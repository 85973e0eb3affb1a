"""`python -m spmdrl.tools.replay RUN --step N`: compute a recorded step again, without an engine.

From the rollouts that `debug.save_rollouts` saved and the weights before the step come advantages, loss and gradients;
what differs from those of the run is printed. Under torchrun on as many ranks as trained, and on the same machine,
nothing does. The run's folder is only read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers.utils import logging as transformers_logging

from spmdrl import checkpoint
from spmdrl.algo.metrics import merge_all
from spmdrl.algo.seeds import mix
from spmdrl.checkpoint.manifest import folder_of
from spmdrl.config import Config
from spmdrl.config.base import NonNegativeInt
from spmdrl.config.plan import Plan, layout_problems, layouts
from spmdrl.dist.collectives import gather_objects, raise_on_all_ranks
from spmdrl.dist.session import launched_ranks
from spmdrl.faults.text import Parser, say
from spmdrl.faults.verdict import EXIT_DIVERGED
from spmdrl.learn.learner import POLICY, start_learners
from spmdrl.learn.update import update
from spmdrl.model.policy import Policy
from spmdrl.preflight.inputs import open_training_prompts
from spmdrl.replay.recorder import GradientHooks, StepFingerprint, advantages_of_all, difference, read_fingerprints
from spmdrl.report import RunFolder
from spmdrl.report.files import read_rows
from spmdrl.rollout.env_context import restore_rollout
from spmdrl.rollout.files import Recording, as_collected, read_parts, recorded_steps
from spmdrl.run import Run, open_run
from spmdrl.step.advantages import add_advantages
from spmdrl.step.batch import build_batch, to_sequences
from spmdrl.step.correction import correct, select_by_covariance
from spmdrl.step.images import Images
from spmdrl.step.logprobs import add_logprobs
from spmdrl.step.rewards import shape_rewards
from spmdrl.step.teachers import FrozenModels
from spmdrl.tools.program import option, program
from spmdrl.types import TrainingDiverged, UserError

EXIT_DIFFERENT = 1
NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Replay:
    """A step as the run found it and as it is found now, of all ranks."""

    before: list[StepFingerprint] | None  # None when the run did not get to the end of the step
    now: list[StepFingerprint]


def replay(path: Path, step: int) -> Replay:
    """Compute the step again on the ranks that torchrun started; every one of them must call this.

    Raises UserError when the step, or the weights before it, were not saved, and TrainingDiverged as the run did.
    """
    folder = RunFolder(path)
    folder.require_launch()
    parts = read_parts(folder.rollouts, step)
    if step > 1 and step - 1 not in checkpoint.saved_steps(folder.checkpoints):
        raise UserError(_no_weights(folder, step))
    cfg, plan = _settings(parts[0])
    if problems := list(layout_problems(cfg, launched_ranks())):
        raise UserError("\n".join(problems))
    before = read_fingerprints(folder.rollouts, step, num_ranks=parts[0].num_ranks)
    with open_run(cfg, folder, layouts=layouts(cfg)) as run:
        return Replay(before, _compute(run, plan, parts, step=step))


def _compute(run: Run[Config], plan: Plan, parts: Sequence[Recording], *, step: int) -> list[StepFingerprint]:
    """Run the phases of the step between sampling and refit; returns what every rank found."""
    cfg, meshes, folder = run.cfg, run.meshes, run.folder
    policy = run.load_policy()
    images = _images_of(run, policy, parts)
    frozen = FrozenModels.of(run, policy, images.store)
    learners = start_learners(policy, cfg, plan, meshes, dtype=run.dtype, followers=frozen.followers)
    before = folder_of(folder.checkpoints, step - 1)
    if step > 1 or before.exists():
        checkpoint.require_whole(before, meshes.training, remedy="replay another step")
    checkpoint.restore(folder.checkpoints, learners, meshes.training, step=step - 1)
    hooks = GradientHooks(learners)

    # On as many ranks as trained, each takes what it had then.
    collected = as_collected(parts[run.world.rank :: run.world.num_ranks], group_size=cfg.rollout.group_size)
    outcomes = [(rollout, future.result()) for rollout, future in collected.pending]
    rewarded = shape_rewards(outcomes, collected.index_of, cfg)
    sequences = to_sequences(rewarded, meshes.training, frozen.label, **cfg.sequences)
    batch = build_batch(sequences, plan, meshes, **cfg.weighting)
    images.restore(rollout for rollout, _ in outcomes)
    batch, _, _ = images.encode_batch(batch)
    batch = add_logprobs(batch, learners, frozen, cfg, meshes)
    batch = add_advantages(batch, cfg, learners[POLICY].coefficients, meshes)
    batch = correct(batch, cfg, meshes)
    batch = select_by_covariance(batch, cfg.losses, meshes, seed=mix(cfg.run.seed, step))
    with frozen.teaching():
        updates = [update(learner, batch.mini_batches, meshes, step=step) for learner in learners.values()]
    return gather_objects(meshes.training, hooks.take(batch.mini_batches, merge_all(updates)))


def _images_of(run: Run[Config], policy: Policy, parts: Sequence[Recording]) -> Images:
    """Return the encoder of the step's images: those of prompts are read from the run's data again."""
    options: dict[str, Any] = {"dtype": run.dtype, "max_patches": run.cfg.pack.max_patches_per_pass}
    if not any(one.images for part in parts for rollout, _ in part.outcomes for one in rollout.trajectories):
        return Images(policy, None, run.meshes, **options)
    with raise_on_all_ranks(run.meshes.training):
        prompts, images = open_training_prompts(run.cfg)
    observed = partial(restore_rollout, images=images)
    return Images(policy, images.store, run.meshes, restore_prompt=prompts.restore, restore_rollout=observed, **options)


def _settings(part: Recording) -> tuple[Config, Plan]:
    """Those of the run when it took the step."""
    try:
        return Config.model_validate_json(json.dumps(part.config)), Plan(**part.plan)
    except (ValidationError, TypeError) as error:
        raise UserError(
            f"step {part.step} was recorded by a version of spmdrl with other settings, so it cannot be computed "
            f"again by this one: {error}"
        ) from error


def _no_weights(folder: RunFolder, step: int) -> str:
    saved = checkpoint.saved_steps(folder.checkpoints)
    can = [s for s in recorded_steps(folder.rollouts) if s == 1 or s - 1 in saved]
    steps = f"steps that can be: {', '.join(map(str, can))}" if can else "no other recorded step has them either"
    return (
        f"step {step} cannot be replayed: {folder.checkpoints} has no checkpoint of step {step - 1}, whose weights it "
        f"began with; {steps}"
    )


def lines(found: Replay, step: int) -> Iterator[str]:
    """Describe how the step as it is found now differs from the run's."""
    numbers = found.now[0].numbers
    if found.before is None:
        yield f"the run did not get to the end of step {step}; there is nothing to compare with"
        yield from (f"{name}: {value:.9g}" for name, value in sorted(numbers.items()))
        return
    apart = difference(found.before, found.now)
    num_tokens = sum(len(advantages) for advantages in advantages_of_all(found.now).values())
    if apart.same_parts:
        yield from _difference_lines("weights before the step", len(found.now[0].weights), apart.weights)
    yield f"advantages of {num_tokens} tokens: largest difference {apart.advantages:g}"
    for name, distance in apart.numbers.items():
        before = found.before[0].numbers.get(name)
        yield f"{name}: {before} in the run, {numbers.get(name)} now: difference {distance:g}"
    if apart.same_parts:
        worst = sorted(apart.gradients, key=lambda name: -apart.gradients[name])
        sizes = [f"{name} by about {apart.gradients[name]:.1e} of its norm" for name in worst]
        yield from _difference_lines("gradients", len(found.now[0].gradients), sizes)
    else:
        yield (
            f"{len(found.before)} ranks trained, and here are {len(found.now)}: each has other parts of weights and "
            "gradients, of which only the norm of all gradients is compared"
        )
    yield f"step {step}: no difference" if apart.is_none else f"step {step}: different"


def schedule_lines(path: Path, step: int) -> Iterator[str]:
    """Describe what engines sampled for the step and alongside it, where the run recorded that. Raises UserError."""
    for row in read_rows(path):
        for number, engine in enumerate(row["engines"] if row["step"] == step else ()):
            yield (
                f"engine {number}, version {engine['version']}: opened {len(engine['opened'])} prompt groups, finished "
                f"{len(engine['trained'])} of the step's, paused after {engine['tokens']} tokens of each row, and left "
                f"{len(engine['left'])} for later"
            )


def _difference_lines(what: str, count: int, differing: Sequence[str]) -> Iterator[str]:
    if not differing:
        yield f"{what}: all {count} the same to the last bit"
        return
    more = f" and {len(differing) - NAMES_SHOWN} more" if len(differing) > NAMES_SHOWN else ""
    yield f"{what}: {len(differing)} of {count} differ: {', '.join(differing[:NAMES_SHOWN])}{more}"


@program("cannot replay")
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 1 when something differs, 2 when the user must change something, 3 when the
    step diverges."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--step", type=option(NonNegativeInt), required=True, help="the step to compute again")
    arguments = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        found = replay(arguments.run, arguments.step)
    except TrainingDiverged as error:
        if is_first:
            say(f"training diverges: {error}", sys.stderr)
        return EXIT_DIVERGED
    if not is_first:
        return 0  # the first speaks for all: torchrun would end it when another one fails
    schedule = schedule_lines(RunFolder(arguments.run).schedule, arguments.step)
    say("\n".join([*schedule, *lines(found, arguments.step)]))
    differs = found.before is not None and not difference(found.before, found.now).is_none
    return EXIT_DIFFERENT if differs else 0


if __name__ == "__main__":
    sys.exit(main())
