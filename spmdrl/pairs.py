"""Training on pairs of answers, of which one is preferred: the batches and the update of fine-tuning, with a reference.

`python -m spmdrl.pairs CONFIG.toml [section.key=value ...]`, alone or under torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from spmdrl.preflight.settings import before_imports

if __name__ == "__main__":  # a mistake need not wait for the imports below
    before_imports("spmdrl.pairs")

from spmdrl import checkpoint
from spmdrl.config import PreferencesConfig
from spmdrl.config.distill import REFERENCE
from spmdrl.learn.learner import POLICY, Learner
from spmdrl.learn.pairs import pair_objective
from spmdrl.learn.update import update
from spmdrl.preflight.launch import import_libraries, run_from_command_line
from spmdrl.rollout.sampler import Sampler
from spmdrl.run import Inputs, Launch
from spmdrl.step.batch import build_batch
from spmdrl.step.handover import NoHandover
from spmdrl.step.images import start_images
from spmdrl.step.logprobs import add_reference
from spmdrl.step.steps import Steps
from spmdrl.step.tuning_data import (
    PAIR_AGGREGATION,
    ComparisonEncoder,
    HeldOutPairs,
    describe_comparison,
    read_comparisons,
)


def prefer(run: Launch[PreferencesConfig]) -> None:
    """Train to prefer the chosen answers, from where the run begins to its last step, or until it is asked to stop."""
    cfg, plan, meshes = run.cfg, run.plan, run.meshes
    with run.report.span("load"):
        model = run.load_trained()  # a policy, or a reward model
        reference = run.load_frozen(model).get(REFERENCE)
    learner = Learner(model, cfg.optim, pair_objective(cfg.pairs), num_updates=plan.num_updates, dtype=run.dtype)
    learners = {POLICY: learner}
    saver = run.enter(closing(checkpoint.start_saver(cfg, run.folder.checkpoints, learners, meshes)))
    checkpoint.restore(run.resume_point.folder, learners, meshes.training, step=run.resume_point.step)
    encode, images = ComparisonEncoder(cfg, run.inputs), start_images(run, model)
    held_out = HeldOutPairs(run, learner, reference, encode, images)
    steps = Steps(run, model, saver, NoHandover(), Sampler(), held_out=held_out)

    steps.announce()
    with steps.until_stopped():
        for step in steps:
            with steps.phase("batch"):
                batch = build_batch(read_comparisons(run, encode, step), plan, meshes, aggregation=PAIR_AGGREGATION)
            with run.report.span("images"):
                batch, _, vision_metrics = images.encode_batch(batch)
            with steps.phase("logprobs"):
                batch = add_reference(batch, reference, meshes.training)
            with steps.phase("update"):
                updated = update(learner, batch.mini_batches, meshes, step=step)
            steps.evaluate(step)
            values = steps.report(step, [batch.metrics, vision_metrics, updated])
            steps.finish(step, values)


def check(cfg: PreferencesConfig, inputs: Inputs) -> Sequence[str]:
    """Tokenize one pair, for --dry-run; returns lines that describe what was checked."""
    (pair,) = inputs.prompts.pairs(0, 1)
    return [
        f"model {cfg.model.path}: {type(inputs.model_config).__name__.removesuffix('Config')}",
        *inputs.prompts.remarks(),
        *describe_comparison(pair, ComparisonEncoder(cfg, inputs)(pair, 0)),
        f"{len(inputs.held_out)} held-out pairs",
    ]


def prepare(argv: Sequence[str]) -> None:
    """Import what a command line asks for, in the process that ranks are forked from."""
    import_libraries(PreferencesConfig, *argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_from_command_line(PreferencesConfig, prefer, check, argv)


if __name__ == "__main__":
    sys.exit(main())
