"""The loop. Every rank runs `torchrun --nproc-per-node N -m spmdrl.train CONFIG.toml [section.key=value ...]`.

    refit -> [ rollout -> reward -> pack -> prepare -> update -> refit -> (eval, save) ] x num_steps

After step N the policy and the engine are both at version N. They share the device: `phases` takes it from one to the
other, and between the two the trainer sleeps. With `rollout.placement = "disaggregated"` some ranks hold engines and
nothing else: they run `rollout/serve.py`, and the loop here knows them as an engine and a sampler that are elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from spmdrl import checkpoint
from spmdrl.batch import build_batch, to_sequence
from spmdrl.coefficients import next_coefficients, starting_coefficients
from spmdrl.config import Config
from spmdrl.dist.collectives import failing_together, gather_objects, merge_over, require_same
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.evaluate import eval_metrics
from spmdrl.export import export_hf
from spmdrl.guard import Guard
from spmdrl.inputs import Inputs
from spmdrl.launch import run_from_command_line
from spmdrl.metrics import histograms, merge_all, scalars, worst_tokens
from spmdrl.mismatch import exceeded
from spmdrl.model.invariant import SWITCHES
from spmdrl.model.load import compute_dtype, load_policy, load_reference
from spmdrl.model.offload import TrainerMemory
from spmdrl.model.operators import kernel_of_run
from spmdrl.objective import PolicyObjective
from spmdrl.phases import Phases
from spmdrl.prepare import prepare
from spmdrl.probe import probe_metrics
from spmdrl.refit.refit import Refit
from spmdrl.report import Report, RunFolder
from spmdrl.report.resources import (
    drop_metrics,
    host_peak_gib,
    loading_line,
    resource_metrics,
    time_metrics,
    with_speed,
)
from spmdrl.report.samples import sample_rows, worst_token_rows
from spmdrl.rewards.judge import Judge
from spmdrl.rollout.serve import serve
from spmdrl.rollout.start import start_engine, start_sampler
from spmdrl.score import rollout_metrics, score_groups
from spmdrl.update import Learner, update


def run(cfg: Config, inputs: Inputs, folder: RunFolder) -> None:
    """Join the other ranks and take this rank's part: to train, or to hold an engine for those that do."""
    plan = inputs.plan
    step = checkpoint.newest_step(folder.checkpoints)
    with (
        Judge(cfg.reward, inputs.tokenizer) as judge,
        spmd_session(
            threads_per_rank=cfg.run.threads_per_rank,
            deterministic=cfg.run.deterministic,
            patience_minutes=cfg.run.patience_minutes,
        ) as world,
    ):
        meshes = build_meshes(world, cfg.parallel, ranks_per_engine=cfg.rollout.tp_size, engine_ranks=plan.engine_ranks)
        require_same(meshes.world, step, f"the newest checkpoint in {folder.checkpoints}")
        take_part = train if meshes.trains else sample_for_others
        take_part(cfg, inputs, folder, world, meshes, judge, step)


def sample_for_others(
    cfg: Config, inputs: Inputs, folder: RunFolder, world: World, meshes: Meshes, judge: Judge, step: int
) -> None:
    """Hold an engine for the ranks that train, to the last step."""
    with closing(start_engine(cfg, inputs.model_config, inputs.plan, world, meshes)) as engine:
        serve(
            cfg,
            inputs.plan,
            meshes,
            judge,
            engine,
            inputs.prompts,
            inputs.held_out,
            inputs.stop_token_ids,
            step=step,
            saved=checkpoint.collector_state(folder.checkpoints, step=step),
        )


def train(
    cfg: Config, inputs: Inputs, folder: RunFolder, world: World, meshes: Meshes, judge: Judge, step: int
) -> None:
    """Train from the checkpoint of `step`, or from the start, to the last step, and export the model."""
    plan = inputs.plan
    with (
        Report(cfg.report, folder, num_steps=plan.num_steps, active=world.is_main, start_step=step) as report,
        ExitStack() as at_the_end,
    ):
        for sentence in judge.unprotected:
            report.message(f"reward.sandbox: {sentence}")
        dtype = compute_dtype(cfg.model.compute_dtype, world.device.type)
        scoring: dict[str, Any] = {
            "temperature": cfg.rollout.temperature,
            "kernel": kernel_of_run(cfg, world.device.type, dtype),
        }
        policy = load_policy(cfg.model, meshes.model, **scoring)
        reference = load_reference(cfg.model, cfg.loss, meshes.model, **scoring, reward=cfg.reward)
        learner = Learner.start(
            policy,
            cfg.optim,
            num_updates=plan.num_updates,
            dtype=dtype,
            coefficients=starting_coefficients(cfg),
        )
        checkpoint.restore(folder.checkpoints, learner, meshes.training, step=step)
        objective = PolicyObjective(cfg.loss, learner.coefficients, cfg.correction, cfg.mismatch)
        guard = Guard.of(cfg, meshes.training)
        trainer = TrainerMemory(policy, learner.optimizer, world.device, moves=cfg.offload.trainer)
        trainer.sleep()  # an engine may take its share of what is free when it starts
        engine = start_engine(cfg, inputs.model_config, plan, world, meshes, tell=report.message)
        at_the_end.enter_context(closing(engine))
        refit = Refit(policy, engine, meshes, cfg.refit, dtype=dtype)
        phases = Phases(
            trainer,
            engine,
            refit,
            meshes.training,
            cfg.offload,
            plan=inputs.memory,
            restart_engine=cfg.rollout.restart_engine,
            tell=report.message,
            span=report.span,
        )
        sampler = start_sampler(
            cfg,
            plan,
            engine,
            judge.submit,
            inputs.prompts,
            inputs.held_out,
            inputs.stop_token_ids,
            meshes,
            tell=report.message,
            restarts=phases.restarts,
        )
        sampler.restore(checkpoint.collector_state(folder.checkpoints, step=step), step=step)
        report.message(loading_line(gather_objects(meshes.training, host_peak_gib())))
        report.expect(inputs.phases)
        if world.is_main:
            folder.write_launch(cfg, plan)

        def evaluate() -> None:
            with phases.rollout():
                pending = sampler.sample_held_out()
            judged = judge.collect(pending)
            report.eval(step, scalars(merge_over(meshes.training, eval_metrics(judged, cfg.reward))))

        phases.refit(version=step)
        if step == 0 and plan.evaluates_after(0):
            evaluate()
        report.memory(step, phases.take_edges())
        report.take_times()

        while step < plan.num_steps:
            step += 1
            passed_over = inputs.prompts.dropped
            with report.span("rollout"), phases.rollout():
                collected = sampler.collect(step)
            with report.span("reward"):
                scored = score_groups(judge.collect(collected.pending), cfg, meshes.training)
            with report.span("pack"):
                with failing_together(meshes.training):
                    sequences = [to_sequence(one, collected.index_of(one.rollout)) for one in scored]
                batch = build_batch(sequences, plan, meshes, aggregation=cfg.loss.aggregation)
            with phases.training():
                with report.span("probe"):
                    probed = probe_metrics(policy, collected.probes, meshes)
                with report.span("logprobs"):
                    mini_batches, prepared = prepare(
                        learner, reference, batch.mini_batches, cfg, plan, meshes, step=step
                    )
                with report.span("update"):
                    updated = update(learner, mini_batches, objective, meshes, step=step, guard=guard)
            with report.span("refit"):
                phases.refit(version=step)
            with report.span("eval"):
                if plan.evaluates_after(step):
                    evaluate()
            metrics = merge_over(
                meshes.training,
                merge_all([collected.metrics, rollout_metrics(scored), probed, batch.metrics, prepared, updated])
                | drop_metrics(passed_over, inputs.prompts.dropped)
                | time_metrics(report.take_times())
                | resource_metrics(report.take_peaks()),
            )
            values = scalars(metrics)
            for warning in exceeded(values, cfg.mismatch.warn):
                report.message(f"step {step}: {warning}")
            learner.coefficients.update(
                next_coefficients(learner.coefficients, values, cfg, rollouts=plan.rollouts_per_step)
            )
            report.step(
                step,
                with_speed(values),
                samples=sample_rows(scored, inputs.tokenizer),
                histograms=histograms(metrics),
                worst_tokens=worst_token_rows(worst_tokens(metrics).get("mismatch/max_abs_nats", ()), inputs.tokenizer),
            )
            if plan.saves_after(step):
                with phases.training(), report.span("save"):
                    checkpoint.save(
                        folder.checkpoints,
                        learner,
                        meshes.training,
                        step=step,
                        keep_last=cfg.checkpoint.keep_last,
                        collector=sampler.state(),
                    )
            if plan.exports_after(step):
                with phases.training(), report.span("export"):
                    export_hf(policy, inputs.tokenizer, folder.hf_after(step), meshes, dtype=dtype)
            report.memory(step, phases.take_edges())
        if cfg.export.at_end:
            with phases.training():
                export_hf(policy, inputs.tokenizer, folder.hf, meshes, dtype=dtype)


def check(cfg: Config, inputs: Inputs) -> Sequence[str]:
    """Score one sample, as --dry-run promises; returns what was found to be in order."""
    prompt = inputs.prompts.take(0, 1)[0]
    with Judge(cfg.reward, inputs.tokenizer) as judge:
        outcome = judge.check(prompt)
        unprotected = judge.unprotected
    return [
        f"model {cfg.model.path}: {type(inputs.model_config).__name__.removesuffix('Config')}",
        f"tokenizer: {len(inputs.tokenizer)} tokens, responses stop at {sorted(inputs.stop_token_ids)}",
        f"first prompt ({len(prompt.token_ids)} tokens, {prompt.task}): {prompt.text[-200:]!r}",
        f"reward of its reference answer: {outcome.reward:g} {outcome.parts}",
        *(f"reward.sandbox: {sentence}" for sentence in unprotected),
        f"{len(inputs.held_out)} held-out prompts",
        *(f"true_on_policy: {switch}" for switch in (SWITCHES if cfg.true_on_policy else ())),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_from_command_line(Config, run, check, argv)


if __name__ == "__main__":
    sys.exit(main())
