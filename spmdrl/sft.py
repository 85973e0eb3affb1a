"""Supervised fine-tuning: the same batches and the same update, on (prompt, response) pairs instead of rollouts.

`python -m spmdrl.sft CONFIG.toml [section.key=value ...]`, alone or under torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from spmdrl.preflight.settings import before_imports

if __name__ == "__main__":  # a mistake need not wait for the imports below
    before_imports("spmdrl.sft")

from spmdrl import checkpoint
from spmdrl.config import SftConfig
from spmdrl.learn.learner import POLICY, Learner
from spmdrl.learn.objective import SftObjective
from spmdrl.learn.update import update
from spmdrl.preflight.launch import import_libraries, run_from_command_line
from spmdrl.rollout.sampler import Sampler
from spmdrl.run import Inputs, Launch
from spmdrl.step.batch import build_batch
from spmdrl.step.handover import NoHandover
from spmdrl.step.images import start_images
from spmdrl.step.steps import Steps
from spmdrl.step.teachers import FrozenModels, teacher_lines
from spmdrl.step.tuning_data import HeldOutLoss, PairEncoder, describe, read_pairs


def fine_tune(run: Launch[SftConfig]) -> None:
    """Train to imitate the responses, from where the run begins to its last step, or until it is asked to stop."""
    cfg, plan, meshes = run.cfg, run.plan, run.meshes
    with run.report.span("load"):
        policy = run.load_policy()
        frozen = FrozenModels.of(run, policy, run.inputs.images.store)
    objective = SftObjective(cfg.sft.loss_coef, cfg.distill)
    learner = Learner(
        policy, cfg.optim, objective, num_updates=plan.num_updates, dtype=run.dtype, followers=frozen.followers
    )
    learners = {POLICY: learner}
    saver = run.enter(closing(checkpoint.start_saver(cfg, run.folder.checkpoints, learners, meshes)))
    checkpoint.restore(run.resume_point.folder, learners, meshes.training, step=run.resume_point.step)
    encode, images = PairEncoder.of(cfg, run.inputs), start_images(run, policy)
    steps = Steps(run, policy, saver, NoHandover(), Sampler(), held_out=HeldOutLoss(run, policy, encode, images))

    steps.announce()
    with steps.until_stopped():
        for step in steps:
            with steps.phase("batch"):
                batch = build_batch(read_pairs(run, encode, step, frozen.label), plan, meshes, **cfg.weighting)
            with run.report.span("images"):
                batch, _, vision_metrics = images.encode_batch(batch)
            with run.report.span("logprobs"):
                batch = frozen.teach(batch, meshes)
            with steps.phase("update"), frozen.teaching():
                updated = update(learner, batch.mini_batches, meshes, step=step)
            steps.evaluate(step)
            values = steps.report(step, [batch.metrics, vision_metrics, updated])
            steps.finish(step, values)


def check(cfg: SftConfig, inputs: Inputs) -> Sequence[str]:
    """Tokenize one pair, for --dry-run; returns lines that describe what was checked."""
    (pair,) = inputs.prompts.pairs(0, 1)
    encode = PairEncoder.of(cfg, inputs)
    for held_out in inputs.held_out_pairs:
        encode(held_out, 0)  # raises when one is too long
    return [
        f"model {cfg.model.path}: {type(inputs.model_config).__name__.removesuffix('Config')}",
        *inputs.prompts.remarks(),
        *describe(pair, encode(pair, 0)),
        *teacher_lines(cfg),
        f"{len(inputs.held_out)} held-out prompts",
    ]


def prepare(argv: Sequence[str]) -> None:
    """Import what a command line asks for, in the process that ranks are forked from."""
    import_libraries(SftConfig, *argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_from_command_line(SftConfig, fine_tune, check, argv)


if __name__ == "__main__":
    sys.exit(main())
