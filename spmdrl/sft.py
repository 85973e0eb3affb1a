"""Supervised fine-tuning: the same batches and the same update, on (prompt, response) pairs instead of rollouts.

`python -m spmdrl.sft CONFIG.toml [section.key=value ...]`, alone or under torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from transformers import PreTrainedTokenizerBase

from spmdrl import checkpoint
from spmdrl.config import SftConfig
from spmdrl.data.tokenizer import encode_text
from spmdrl.dist.collectives import failing_together
from spmdrl.learn.learner import Learner
from spmdrl.learn.learners import POLICY
from spmdrl.learn.objective import SftObjective
from spmdrl.learn.update import update
from spmdrl.preflight.launch import run_from_command_line
from spmdrl.rollout.sampler import Sampler
from spmdrl.run import Inputs, Launch
from spmdrl.step.batch import build_batch
from spmdrl.step.handover import TrainerAlone
from spmdrl.step.steps import Steps
from spmdrl.types import Prompt, UserError
from spmdrl.types import Sequence as TrainingSequence


def fine_tune(run: Launch[SftConfig]) -> None:
    """Train to imitate the responses, from where the run begins to its last step, or until it is asked to stop."""
    cfg, plan, meshes = run.cfg, run.plan, run.meshes
    with run.report.span("load"):
        policy = run.load_policy()
    learner = Learner.start(policy, cfg.optim, SftObjective(), num_updates=plan.num_updates, dtype=run.dtype)
    learners = {POLICY: learner}
    saver = run.enter(closing(checkpoint.start_saver(cfg, run.folder.checkpoints, learners, meshes)))
    checkpoint.restore(run.resume_point.folder, learners, meshes.training, step=run.resume_point.step)
    steps = Steps(run, policy, saver, TrainerAlone(), Sampler())

    steps.announce()
    with steps.until_stopped():
        for step in steps:
            with steps.phase("batch"):
                with failing_together(meshes.training):
                    sequences = read_pairs(run, step)
                batch = build_batch(sequences, plan, meshes, aggregation="token_mean")
            with steps.phase("update"):
                updated = update(learner, batch.mini_batches, meshes, step=step)
            values = steps.report(step, [batch.metrics, updated])
            steps.finish(step, values)


def read_pairs(run: Launch[SftConfig], step: int) -> list[TrainingSequence]:
    """This rank's (prompt, response) pairs of a step."""
    first = run.plan.first_rollout(run.world.rank)
    pairs = run.inputs.prompts.pairs(run.plan.first_prompt(step, run.world.rank), run.plan.prompts_per_rank)
    return [
        to_sequence(prompt, response, index, run.inputs.tokenizer, run.cfg.sft.max_response_tokens)
        for index, (prompt, response) in enumerate(pairs, start=first)
    ]


def to_sequence(
    prompt: Prompt, response: str, index: int, tokenizer: PreTrainedTokenizerBase, max_response_tokens: int
) -> TrainingSequence:
    """Prompt, response and end-of-sequence token; the last two are trained. Raises UserError when it is too long."""
    assert tokenizer.eos_token_id is not None
    tokens = (*encode_text(tokenizer, response), tokenizer.eos_token_id)
    if len(tokens) > max_response_tokens:
        raise UserError(
            f"sft.max_response_tokens = {max_response_tokens}, but the response to prompt {prompt.prompt_id} "
            f"({prompt.text[:60]!r}) has {len(tokens)} tokens; set it to {len(tokens)} or more"
        )
    length = len(prompt.token_ids) + len(tokens)
    return TrainingSequence(
        index=index,
        token_ids=prompt.token_ids + tokens,
        loss_mask=(False,) * len(prompt.token_ids) + (True,) * len(tokens),
        rollout_logprobs=(0.0,) * length,
        reward=0.0,
    )


def check(cfg: SftConfig, inputs: Inputs) -> Sequence[str]:
    """Tokenize one pair, for --dry-run; returns lines that describe what was checked."""
    ((prompt, response),) = inputs.prompts.pairs(0, 1)
    sequence = to_sequence(prompt, response, 0, inputs.tokenizer, cfg.sft.max_response_tokens)
    return [
        f"model {cfg.model.path}: {type(inputs.model_config).__name__.removesuffix('Config')}",
        f"first pair ({len(sequence.token_ids)} tokens): {prompt.text[-200:]!r} -> {response!r}",
        f"{len(inputs.held_out)} held-out prompts",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_from_command_line(SftConfig, fine_tune, check, argv)


if __name__ == "__main__":
    sys.exit(main())
