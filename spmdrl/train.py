"""The loop. Every rank runs `torchrun --nproc-per-node N -m spmdrl.train CONFIG.toml [section.key=value ...]`.

    refit -> [ rollout -> reward -> batch -> prepare -> update -> refit -> (eval, save) ] x num_steps

After step N the policy and the engine are both at version N. They share the device: `phases` takes it from one to the
other, and between the two the trainer sleeps. With `rollout.placement = "disaggregated"` some ranks hold engines and
nothing else: they run `rollout/serve.py`, and the loop here knows them as an engine and a sampler that are elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch

from spmdrl import checkpoint
from spmdrl.algo.metrics import histograms, merge_all, scalars, worst_tokens
from spmdrl.config import Config
from spmdrl.dist.collectives import failing_together, gather_objects, merge_over
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.watch import Watch, watch_over
from spmdrl.learn.coefficients import next_coefficients
from spmdrl.learn.learners import POLICY, objectives_of, start_learners
from spmdrl.learn.limits import Guard
from spmdrl.learn.mismatch import exceeded
from spmdrl.learn.update import update
from spmdrl.model.load import compute_dtype, load_policy, load_reference
from spmdrl.model.offload import TrainerMemory
from spmdrl.model.operators import kernel_of_run, operators_of
from spmdrl.preflight.inputs import Inputs
from spmdrl.preflight.launch import run_from_command_line
from spmdrl.refit.refit import Refit
from spmdrl.replay.recorder import start_recorder
from spmdrl.report import Report, RunFolder
from spmdrl.report.memory import host_peak_bytes
from spmdrl.report.resources import drop_metrics, loading_line, resource_metrics, time_metrics, with_speed
from spmdrl.report.run_folder import describe_machine
from spmdrl.report.samples import sample_rows, worst_token_rows
from spmdrl.rewards.client import RewardClient
from spmdrl.rollout.serve import serve
from spmdrl.rollout.start import start_engine, start_sampler
from spmdrl.step.batch import build_batch, to_sequence
from spmdrl.step.evaluate import eval_metrics
from spmdrl.step.export import export_hf
from spmdrl.step.handover import Phases
from spmdrl.step.logprobs import prepare
from spmdrl.step.probe import probe_metrics
from spmdrl.step.score import failure_lines, rollout_metrics, score_groups
from spmdrl.types import StopRequested


def run(cfg: Config, inputs: Inputs, folder: RunFolder) -> None:
    """Join the other ranks and take this rank's part: to train, or to hold an engine for those that do."""
    plan = inputs.plan
    with (
        RewardClient(cfg.reward, inputs.tokenizer) as judge,
        spmd_session(
            threads_per_rank=cfg.run.threads_per_rank,
            deterministic=cfg.run.deterministic,
            patience_minutes=cfg.run.patience_minutes,
        ) as world,
        watch_over(
            FaultFiles(folder.path), world, timeout_s=cfg.watchdog.timeout_s, stop_before=cfg.run.stop_before
        ) as watch,
    ):
        meshes = build_meshes(world, cfg.parallel, ranks_per_engine=cfg.rollout.tp_size, engine_ranks=plan.engine_ranks)
        origin = checkpoint.find_resume_point(cfg, folder.checkpoints, meshes.world)
        take_part = train if meshes.trains else sample_for_others
        take_part(cfg, inputs, folder, world, meshes, judge, watch, origin)


def sample_for_others(
    cfg: Config,
    inputs: Inputs,
    folder: RunFolder,
    world: World,
    meshes: Meshes,
    judge: RewardClient,
    watch: Watch,
    origin: checkpoint.ResumePoint,
) -> None:
    """Hold an engine for the ranks that train, until they want no more."""
    with closing(start_engine(cfg, inputs.model_config, inputs.plan, world, meshes)) as engine, watch.reporting():
        serve(
            cfg,
            inputs.plan,
            meshes,
            judge,
            watch,
            engine,
            inputs.prompts,
            inputs.held_out,
            inputs.stop_token_ids,
            step=origin.step,
            saved=checkpoint.collector_state(origin.folder, step=origin.step),
            evaluated=origin.is_evaluated,
        )


def train(
    cfg: Config,
    inputs: Inputs,
    folder: RunFolder,
    world: World,
    meshes: Meshes,
    judge: RewardClient,
    watch: Watch,
    origin: checkpoint.ResumePoint,
) -> None:
    """Train from a checkpoint, or from the start, to the last step, and export the model; or, told to stop, to the next
    edge between two phases. Then a step that has not come to its update is given up, and one that has is finished but
    for its evaluation, which the run that goes on makes first."""
    plan, step = inputs.plan, origin.step
    with (
        Report(
            cfg.report,
            folder,
            num_steps=plan.num_steps,
            active=world.is_main,
            start_step=origin.saved_step,
            on_phase=watch.enter,
        ) as report,
        ExitStack() as at_the_end,
        watch.reporting(),
    ):
        for sentence in judge.unprotected:
            report.message(f"reward.sandbox: {sentence}")
        dtype = compute_dtype(cfg.model.compute_dtype, world.device.type)
        scoring: dict[str, Any] = {
            "temperature": cfg.rollout.temperature,
            "kernel": kernel_of_run(cfg, world.device.type, dtype),
        }
        with report.span("load"):
            policy = load_policy(cfg.model, meshes.model, **scoring)
            reference = load_reference(cfg.model, cfg.loss, meshes.model, **scoring, reward=cfg.reward)
            learners = start_learners(policy, cfg, plan, meshes.model, dtype=dtype)
        coefficients = learners[POLICY].coefficients
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
        objectives = objectives_of(cfg, learners)
        guards = {POLICY: Guard.of(cfg, meshes.training)}
        recorder = start_recorder(cfg, plan, learners, meshes.training, folder.rollouts)
        trainer = TrainerMemory(list(learners.values()), world.device, moves=cfg.offload.trainer)
        trainer.sleep()  # an engine may take its share of what is free when it starts
        watch.enter("start engine")
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
            watch.marking_progress(judge.submit),
            inputs.prompts,
            inputs.held_out,
            inputs.stop_token_ids,
            meshes,
            tell=report.message,
            heed=watch.request_stop,
            restarts=phases.restarts,
        )
        sampler.restore(checkpoint.collector_state(origin.folder, step=step), step=step)
        for note in origin.notes:
            report.message(note)
        report.message(loading_line(gather_objects(meshes.training, host_peak_bytes())))
        report.expect(inputs.phases)
        if world.is_main:
            folder.write_launch(cfg, plan)

        # The last step that is finished, and what is known of it: what a checkpoint is about.
        done, measured = step, dict(origin.metrics or {})

        def evaluate() -> dict[str, float]:
            with phases.rollout():
                pending = sampler.sample_held_out()
            judged = judge.collect(pending)
            evaluated = scalars(merge_over(meshes.training, eval_metrics(judged, cfg.reward)))
            report.eval(step, evaluated)
            return evaluated

        def save() -> None:
            with phases.training(), report.span("save"):
                saver.save(done, metrics=measured, collector=sampler.state(done))

        def pass_edge() -> None:
            """Between two phases: go on, unless a rank was told to stop."""
            if watch.agree_to_stop(meshes.training):
                raise StopRequested

        phases.refit(version=step)
        try:
            if plan.evaluates_after(step) and not origin.is_evaluated:
                pass_edge()
                measured |= evaluate()
                if saver.newest == step:
                    saver.amend(metrics=measured)
            report.memory(step, phases.take_edges())
            report.take_times()

            while done < plan.num_steps:
                if watch.agree_to_stop_before_step(meshes.training):
                    raise StopRequested
                step = done + 1
                watch.begin_step(step)
                saved = saver.check()
                passed_over = inputs.prompts.dropped
                # Up to the update a step changes nothing, and can be given up: it is done again from its beginning.
                with report.span("rollout"), phases.rollout():
                    collected = sampler.collect(step)
                pass_edge()
                with report.span("reward"):
                    scored = score_groups(judge.collect(collected.pending), cfg, meshes.training)
                recorder.save_rollouts(step, collected)
                for failure in map(watch.with_oom_kills, failure_lines(step, scored)):
                    watch.note(failure)
                    report.message(failure)
                pass_edge()
                with report.span("batch"):
                    with failing_together(meshes.training):
                        sequences = [to_sequence(one, collected.index_of(one.rollout)) for one in scored]
                    batch = build_batch(sequences, plan, meshes, aggregation=cfg.loss.aggregation)
                pass_edge()
                with phases.training():
                    with report.span("probe"):
                        probed = probe_metrics(policy, collected.probes, meshes)
                    pass_edge()
                    with report.span("logprobs"):
                        mini_batches, prepared = prepare(
                            learners, reference, batch.mini_batches, cfg, plan, meshes, step=step
                        )
                    pass_edge()
                    with report.span("update"):
                        updated = [
                            update(learner, mini_batches, objectives[name], meshes, step=step, guard=guards.get(name))
                            for name, learner in learners.items()
                        ]
                recorder.save_fingerprints(step, mini_batches, merge_all(updated))
                with report.span("refit"):
                    phases.refit(version=step)
                stopping = watch.agree_to_stop(meshes.training)
                with report.span("eval"):
                    evaluated = evaluate() if plan.evaluates_after(step) and not stopping else {}
                metrics = merge_over(
                    meshes.training,
                    merge_all(
                        [collected.metrics, rollout_metrics(scored), probed, batch.metrics, prepared, *updated, saved]
                    )
                    | drop_metrics(passed_over, inputs.prompts.dropped)
                    | time_metrics(report.take_times())
                    | resource_metrics(report.take_peaks()),
                )
                values = scalars(metrics)
                for warning in exceeded(values, cfg.mismatch.warn):
                    report.message(f"step {step}: {warning}")
                coefficients.update(next_coefficients(coefficients, values, cfg, rollouts=plan.rollouts_per_step))
                worst = worst_tokens(metrics).get("mismatch/max_abs_nats", ())
                report.step(
                    step,
                    with_speed(values),
                    samples=sample_rows(scored, inputs.tokenizer),
                    histograms=histograms(metrics),
                    worst_tokens=worst_token_rows(worst, inputs.tokenizer),
                )
                done, measured = step, values | evaluated
                if plan.saves_after(step):
                    save()
                if plan.exports_after(step):
                    with phases.training(), report.span("export"):
                        export_hf(policy, inputs.tokenizer, folder.hf_after(step), meshes, dtype=dtype)
                report.memory(step, phases.take_edges())
                if stopping:
                    raise StopRequested
        except StopRequested:
            if saver.newest != done:
                save()
            saver.wait()
            if world.is_main:
                report.message(watch.write_requeue(step=done, num_steps=plan.num_steps))
            sampler.dismiss()
        else:
            saver.wait()
            sampler.dismiss()
            if cfg.export.at_end:
                with phases.training(), report.span("export"):
                    export_hf(policy, inputs.tokenizer, folder.hf, meshes, dtype=dtype)
        report.compare(scalars(merge_over(meshes.training, resource_metrics(report.take_peaks()))))


def check(cfg: Config, inputs: Inputs) -> Sequence[str]:
    """Score one sample, as --dry-run promises; returns what was found to be in order."""
    prompt = inputs.prompts.take(0, 1)[0]
    with RewardClient(cfg.reward, inputs.tokenizer) as judge:
        outcome = judge.check(prompt)
        unprotected = judge.unprotected
    return [
        f"model {cfg.model.path}: {type(inputs.model_config).__name__.removesuffix('Config')}",
        f"tokenizer: {len(inputs.tokenizer)} tokens, responses stop at {sorted(inputs.stop_token_ids)}",
        f"first prompt ({len(prompt.token_ids)} tokens, {prompt.task}): {prompt.text[-200:]!r}",
        f"reward of its reference answer: {outcome.reward:g} {outcome.parts}",
        *(f"reward.sandbox: {sentence}" for sentence in unprotected),
        f"{len(inputs.held_out)} held-out prompts",
        *(f"true_on_policy: {switch}" for switch in _switches(cfg)),
    ]


def _switches(cfg: Config) -> Sequence[str]:
    """What `true_on_policy` changes."""
    if not cfg.true_on_policy:
        return ()
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    return operators_of(kernel_of_run(cfg, device_type, compute_dtype(cfg.model.compute_dtype, device_type))).switches


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_from_command_line(Config, run, check, argv)


if __name__ == "__main__":
    sys.exit(main())
