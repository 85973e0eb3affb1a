"""The loop. Every rank runs `torchrun --nproc-per-node N -m spmdrl.train CONFIG.toml [section.key=value ...]`.

    refit -> [ rollout -> reward -> batch -> logprobs -> update -> refit -> (eval, save) ] x num_steps

After step N the policy and the engine are both at version N. They share each rank's device: the `handover` gives it to
one of them at a time. With `rollout.placement = "disaggregated"` some ranks only hold engines: they run
`rollout/serve.py`, and the loop here sees a sampler whose engines are elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

import torch

from spmdrl import checkpoint
from spmdrl.algo.metrics import merge_all
from spmdrl.config import Config
from spmdrl.dist.collectives import failing_together
from spmdrl.engine.kinds import start_engine
from spmdrl.learn.coefficients import next_coefficients
from spmdrl.learn.learners import POLICY, objectives_of, start_learners
from spmdrl.learn.limits import Guard
from spmdrl.learn.update import update
from spmdrl.model.load import compute_dtype, load_policy, load_reference
from spmdrl.model.offload import TrainerMemory
from spmdrl.model.operators import kernel_of_run, operators_of
from spmdrl.preflight.launch import run_from_command_line
from spmdrl.refit.refit import Refit
from spmdrl.replay.recorder import start_recorder
from spmdrl.report.samples import sample_rows
from spmdrl.rewards.client import RewardClient
from spmdrl.rollout.serve import serve
from spmdrl.rollout.start import start_sampler
from spmdrl.run import Inputs, Launch
from spmdrl.step.batch import build_batch, to_sequence
from spmdrl.step.handover import start_handover
from spmdrl.step.logprobs import prepare
from spmdrl.step.probe import probe_metrics
from spmdrl.step.score import failure_lines, rollout_metrics, score_groups
from spmdrl.step.steps import Steps


def train(run: Launch[Config]) -> None:
    """Train from where the run begins to its last step, or until it is asked to stop."""
    cfg, plan, meshes, report = run.cfg, run.plan, run.meshes, run.report
    if not meshes.trains:
        return serve(run)
    with report.span("load"):
        policy = load_policy(cfg.model, meshes.model, **run.scoring)  # every rank reads its own shards: FSDP2
        reference = load_reference(cfg.model, meshes.model, **run.scoring) if cfg.has_reference else None
        learners = start_learners(policy, cfg, plan, meshes.model, dtype=run.dtype)
    saver = run.enter(closing(checkpoint.start_saver(cfg, run.folder.checkpoints, learners, meshes)))
    checkpoint.restore(run.resume_point.folder, learners, meshes.training, step=run.resume_point.step)
    recorder = start_recorder(run, learners)
    objectives = objectives_of(cfg, learners)
    guards = {POLICY: Guard.of(cfg, meshes.training)}
    trainer = TrainerMemory(list(learners.values()), run.device, moves=cfg.offload.trainer)
    trainer.sleep()  # an engine may take its share of the free memory when it starts
    run.watch.enter("start engine")
    engine = run.enter(closing(start_engine(run)))
    handover = start_handover(run, trainer, engine, Refit(policy, engine, meshes, cfg.refit, dtype=run.dtype))
    sampler = start_sampler(run, engine, handover.restarts)
    steps = Steps(run, policy, saver, handover, sampler, warn=cfg.mismatch.warn)

    steps.announce()
    handover.refit(version=run.resume_point.step)  # a broken refit fails in the first minute
    with steps.until_stopped():
        for step in steps:
            with report.span("rollout"), handover.rollout():
                collected = sampler.collect(step)
            with steps.phase("reward"):  # a phase begins where all ranks agree to go on
                scored = score_groups(run.rewards.collect(collected.pending), cfg, meshes.training)
            recorder.save_rollouts(step, collected)
            run.watch.note_all(failure_lines(step, scored), show=report.message)
            with steps.phase("batch"):  # one exchange; every rank computes the same plan
                with failing_together(meshes.training):
                    sequences = [to_sequence(one, collected.index_of(one.rollout)) for one in scored]
                batch = build_batch(sequences, plan, meshes, aggregation=cfg.loss.aggregation)
            with handover.training():
                with steps.phase("probe"):
                    probed = probe_metrics(policy, collected.probes, meshes)
                with steps.phase("logprobs"):
                    mini_batches, prepared = prepare(
                        learners, reference, batch.mini_batches, cfg, plan, meshes, step=step
                    )
                with steps.phase("update"):  # until here a step can be abandoned: nothing has changed
                    updated = [
                        update(learner, mini_batches, objectives[name], meshes, step=step, guard=guards.get(name))
                        for name, learner in learners.items()
                    ]
            recorder.save_findings(step, mini_batches, merge_all(updated))
            with report.span("refit"):
                handover.refit(version=step)
            steps.evaluate(step)
            metrics = [collected.metrics, rollout_metrics(scored), probed, batch.metrics, prepared, *updated]
            values = steps.report(step, metrics, samples=sample_rows(scored, run.inputs.tokenizer))
            coefficients = learners[POLICY].coefficients
            coefficients.update(next_coefficients(coefficients, values, cfg, rollouts=plan.rollouts_per_step))
            steps.finish(step, values)


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
    return run_from_command_line(Config, train, check, argv)


if __name__ == "__main__":
    sys.exit(main())
