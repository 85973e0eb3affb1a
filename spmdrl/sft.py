"""Supervised fine-tuning: the same batches and the same update, on (prompt, response) pairs instead of rollouts.

`python -m spmdrl.sft CONFIG.toml [section.key=value ...]`, alone or under torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from transformers import PreTrainedTokenizerBase

from spmdrl import checkpoint
from spmdrl.algo.metrics import histograms, merge_all, scalars
from spmdrl.config import SftConfig
from spmdrl.dist.collectives import failing_together, gather_objects, merge_over
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.watch import watch_over
from spmdrl.learn.learners import POLICY
from spmdrl.learn.objective import SftObjective
from spmdrl.learn.update import Learner, update
from spmdrl.model.load import compute_dtype, load_policy
from spmdrl.preflight.inputs import Inputs
from spmdrl.preflight.launch import run_from_command_line
from spmdrl.report import Report, RunFolder
from spmdrl.report.memory import host_peak_bytes
from spmdrl.report.resources import drop_metrics, loading_line, resource_metrics, time_metrics, with_speed
from spmdrl.report.run_folder import describe_machine
from spmdrl.step.batch import build_batch
from spmdrl.step.export import export_hf
from spmdrl.types import Prompt, UserError
from spmdrl.types import Sequence as TrainingSequence


def fine_tune(cfg: SftConfig, inputs: Inputs, folder: RunFolder) -> None:
    """Train to imitate the responses, from the newest checkpoint or from the start, and export the model."""
    plan = inputs.plan
    with (
        spmd_session(
            threads_per_rank=cfg.run.threads_per_rank,
            deterministic=cfg.run.deterministic,
            patience_minutes=cfg.run.patience_minutes,
        ) as world,
        watch_over(
            FaultFiles(folder.path), world, timeout_s=cfg.watchdog.timeout_s, stop_before=cfg.run.stop_before
        ) as watch,
        ExitStack() as at_the_end,
        watch.reporting(),
    ):
        meshes = build_meshes(world, cfg.parallel)
        origin = checkpoint.find_resume_point(cfg, folder.checkpoints, meshes.world)
        step = origin.step
        report = at_the_end.enter_context(
            Report(
                cfg.report,
                folder,
                num_steps=plan.num_steps,
                active=world.is_main,
                start_step=origin.saved_step,
                on_phase=watch.enter,
            )
        )
        dtype = compute_dtype(cfg.model.compute_dtype, world.device.type)
        with report.span("load"):
            policy = load_policy(cfg.model, meshes.model, temperature=1.0)
        learner = Learner.start(policy, cfg.optim, num_updates=plan.num_updates, dtype=dtype)
        objective = SftObjective()
        learners = {POLICY: learner}
        checkpoint.restore(origin.folder, learners, meshes.training, step=step)
        saver = checkpoint.Saver(
            folder.checkpoints,
            learners,
            meshes,
            cfg.checkpoint,
            configuration=checkpoint.resolved(cfg),
            versions=describe_machine(),
        )
        at_the_end.callback(saver.close)
        for note in origin.notes:
            report.message(note)
        report.message(loading_line(gather_objects(meshes.training, host_peak_bytes())))
        report.expect(inputs.phases)
        if world.is_main:
            folder.write_launch(cfg, plan)
        report.take_times()
        stopping = watch.agree_to_stop_before_step(meshes.training)

        while step < plan.num_steps and not stopping:
            step += 1
            watch.begin_step(step)
            saved = saver.check()
            passed_over = inputs.prompts.dropped
            with report.span("batch"):
                first = plan.first_rollout(world.rank)
                with failing_together(meshes.training):
                    pairs = inputs.prompts.pairs(plan.first_prompt(step, world.rank), plan.prompts_per_rank)
                    sequences = [
                        to_sequence(prompt, response, index, inputs.tokenizer, cfg.sft.max_response_tokens)
                        for index, (prompt, response) in enumerate(pairs, start=first)
                    ]
                batch = build_batch(sequences, plan, meshes, aggregation="token_mean")
            with report.span("update"):
                updated = update(learner, batch.mini_batches, objective, meshes, step=step)
            metrics = merge_over(
                meshes.training,
                merge_all([batch.metrics, updated, saved])
                | drop_metrics(passed_over, inputs.prompts.dropped)
                | time_metrics(report.take_times())
                | resource_metrics(report.take_peaks()),
            )
            values = scalars(metrics)
            report.step(
                step,
                with_speed(values),
                samples=[],
                histograms=histograms(metrics),
            )
            stopping = watch.agree_to_stop_before_step(meshes.training)
            if plan.saves_after(step) or stopping:
                with report.span("save"):
                    saver.save(step, metrics=values)
            if plan.exports_after(step):
                with report.span("export"):
                    export_hf(policy, inputs.tokenizer, folder.hf_after(step), meshes, dtype=dtype)
        saver.wait()
        if step < plan.num_steps:
            if world.is_main:
                report.message(watch.write_requeue(step=step, num_steps=plan.num_steps))
        elif cfg.export.at_end:
            with report.span("export"):
                export_hf(policy, inputs.tokenizer, folder.hf, meshes, dtype=dtype)
        report.compare(scalars(merge_over(meshes.training, resource_metrics(report.take_peaks()))))


def to_sequence(
    prompt: Prompt, response: str, index: int, tokenizer: PreTrainedTokenizerBase, max_response_tokens: int
) -> TrainingSequence:
    """Prompt, response and end-of-sequence token; the last two are trained. Raises UserError when it is too long."""
    assert tokenizer.eos_token_id is not None
    tokens = (*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id)
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
        advantage=0.0,
    )


def check(cfg: SftConfig, inputs: Inputs) -> Sequence[str]:
    """Tokenize one pair, as --dry-run promises; returns what was found to be in order."""
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
