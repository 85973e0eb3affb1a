"""The loop. `torchrun --nproc-per-node N -m spmdrl.train CONFIG.toml [section.key=value ...]` starts it on every rank.

    refit -> [ rollout -> reward -> batch -> logprobs -> update -> refit -> (eval, save) ] x num_steps

| phase | who is awake | what it adds |
|---|---|---|
| rollout | engine | prompt groups, sampled with the weights of the last refit |
| reward | neither | a reward for each rollout |
| batch | neither | this rank's packed micro-batches, after one exchange between the ranks |
| images | trainer | what a frozen tower makes of the images |
| probe, logprobs | trainer | log-probabilities, advantages, corrections for the mismatch of engine and trainer |
| update | trainer | new weights |
| refit | neither | the new weights in the engine, read from wherever the sleeping trainer keeps them |

After step N the policy and the engine are both at version N. Trainer and engine share each rank's device, which the
`handover` gives to one of them at a time. With `rollout.placement = "disaggregated"` some ranks only hold engines: they
run `rollout/serve.py`, and the loop here sees a sampler whose engines are elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing

from spmdrl.preflight.settings import before_imports

if __name__ == "__main__":  # a mistake need not wait for the imports below
    before_imports("spmdrl.train")

from spmdrl import checkpoint
from spmdrl.algo.metrics import merge_all
from spmdrl.algo.seeds import mix
from spmdrl.config import Config
from spmdrl.config.plan import router_lines
from spmdrl.dist.session import default_device_type
from spmdrl.engine.start import start_engine
from spmdrl.envs.client import open_environments
from spmdrl.learn.coefficients import adapt_coefficients
from spmdrl.learn.learner import POLICY, start_learners
from spmdrl.learn.update import update
from spmdrl.model.load import compute_dtype, model_without_memory
from spmdrl.model.offload import TrainerMemory
from spmdrl.model.operators import operators_of
from spmdrl.model.routes import routes_refusal
from spmdrl.preflight.launch import import_libraries, run_from_command_line
from spmdrl.refit.refit import make_refit
from spmdrl.replay.recorder import start_recorder
from spmdrl.rewards.client import RewardClient
from spmdrl.rollout.serve import serve
from spmdrl.rollout.start import start_sampler
from spmdrl.run import Inputs, Launch, kernel_of_run
from spmdrl.step.advantages import add_advantages
from spmdrl.step.batch import build_batch, to_sequences
from spmdrl.step.correction import correct, select_by_covariance
from spmdrl.step.evaluate import probe_batches, probe_metrics
from spmdrl.step.handover import start_handover
from spmdrl.step.images import start_images
from spmdrl.step.logprobs import add_logprobs
from spmdrl.step.rewards import failure_lines, limit_failures, shape_rewards, step_metrics
from spmdrl.step.samples import gather_samples
from spmdrl.step.scores import Scorers
from spmdrl.step.steps import Steps
from spmdrl.step.teachers import FrozenModels, teacher_lines
from spmdrl.types import Prompt


def train(run: Launch[Config]) -> None:
    """Train from where the run begins to its last step, or until it is asked to stop."""
    cfg, plan, meshes, report = run.cfg, run.plan, run.meshes, run.report
    if not meshes.trains:
        return serve(run)
    with report.span("load"):
        policy = run.load_policy()  # every rank reads its own shards: FSDP2
        frozen = FrozenModels.of(run, policy, run.inputs.images.store)
        learners = start_learners(policy, cfg, plan, meshes, dtype=run.dtype, followers=frozen.followers)
        scorers = Scorers(run)
    saver = run.enter(closing(checkpoint.start_saver(cfg, run.folder.checkpoints, learners, meshes)))
    checkpoint.restore(run.resume_point.folder, learners, meshes.training, step=run.resume_point.step)
    recorder = start_recorder(run, learners)
    trainer = TrainerMemory(list(learners.values()), run.device, moves=cfg.offload.trainer)
    trainer.sleep()  # the engine takes its share of what is free when it starts
    run.watch.enter("start engine")
    engine = run.enter(closing(start_engine(run)))
    refit = make_refit(policy, engine, meshes, cfg, dtype=run.dtype)
    handover = start_handover(run, trainer, engine, refit)
    sampler = start_sampler(run, engine, handover.restarts)
    images = start_images(run, policy)
    steps = Steps(
        run,
        policy,
        saver,
        handover,
        sampler,
        warn=cfg.mismatch.warn,
        success_at=cfg.success_at,
        complete=scorers.complete,
    )

    steps.announce(router_lines(cfg, has_routes=routes_refusal(policy.model) is None))
    handover.refit(version=run.resume_point.step)  # a broken refit fails in the first minute
    with steps.until_stopped():
        for step in steps:
            with steps.rollout():
                collected = sampler.collect(step)
            with steps.phase("reward"):  # a vote, then the phase: all ranks stop here if one was asked to
                collected = collected.with_pending(scorers.complete(collected.pending))
                rewarded = shape_rewards(run.rewards.collect(collected.pending), collected.index_of, cfg)
            recorder.save_rollouts(step, collected)
            run.watch.note_all(failure_lines(step, rewarded), show=report.message)
            limit_failures(rewarded, cfg.reward, meshes.training, step=step)
            with steps.phase("batch"):  # every rank computes the same assignment
                images.restore([*(one.rollout for one in rewarded), *collected.probes])
                sequences = to_sequences(rewarded, meshes.training, frozen.label, **cfg.sequences)
                batch = build_batch(sequences, plan, meshes, **cfg.weighting)
                probes = probe_batches(collected.probes, meshes)
            with handover.training():
                with report.span("images"):  # a frozen tower encodes each once, for all that follows
                    batch, probes, vision_metrics = images.encode_batch(batch, probes)
                with steps.phase("probe"):
                    probed = probe_metrics(policy, probes, meshes)
                with steps.phase("logprobs"):
                    batch = add_logprobs(batch, learners, frozen, cfg, meshes)
                    batch = add_advantages(batch, cfg, learners[POLICY].coefficients, meshes)
                    batch = correct(batch, cfg, meshes)
                    batch = select_by_covariance(batch, cfg.losses, meshes, seed=mix(cfg.run.seed, step))
                with steps.phase("update"), frozen.teaching():  # the last vote: from here on weights change
                    updates = [update(learner, batch.mini_batches, meshes, step=step) for learner in learners.values()]
            recorder.save_fingerprints(step, batch.mini_batches, merge_all(updates))
            with report.span("refit"):
                handover.refit(version=step)
            steps.evaluate(step)
            samples = gather_samples(rewarded, batch.advantages, run.inputs.tokenizer, cfg.report, meshes.training)
            metrics = [collected.metrics, step_metrics(rewarded, cfg), vision_metrics, probed, batch.metrics, *updates]
            values = steps.report(step, metrics, samples=samples)
            adapt_coefficients(learners[POLICY].coefficients, values, cfg, rollouts=plan.rollouts_per_step)
            steps.finish(step, values)


def check(cfg: Config, inputs: Inputs) -> Sequence[str]:
    """Reward one reference answer, for --dry-run; returns lines that describe what was checked."""
    prompt = inputs.prompts.take(0, 1)[0]
    with RewardClient(cfg.reward, inputs.tokenizer) as rewards:
        outcome = rewards.check(prompt)
        unprotected = rewards.unprotected
    return [
        f"model {cfg.model.path}: {type(inputs.model_config).__name__.removesuffix('Config')}",
        f"tokenizer: {len(inputs.tokenizer)} tokens, responses stop at {sorted(inputs.stop_token_ids)}",
        *inputs.prompts.remarks(),
        f"first prompt ({len(prompt.token_ids)} tokens, {prompt.task}): {prompt.text[-200:]!r}",
        f"reward of its reference answer: {outcome.reward:g} {outcome.parts}",
        *(["the scores of reward models come on top; only a run computes them"] if cfg.reward.model_terms else []),
        *(["judges of groups, and the policy as one, come on top"] if cfg.reward.group_judges else []),
        *success_lines(cfg, prompt, outcome.reward),
        *(f"reward.sandbox: {sentence}" for sentence in unprotected),
        *_environment_lines(cfg),
        *teacher_lines(cfg),
        *router_lines(cfg, has_routes=routes_refusal(model_without_memory(inputs.model_config, cfg.model)) is None),
        f"{len(inputs.held_out)} held-out prompts",
        *(f"true_on_policy: {switch}" for switch in _switches(cfg)),
    ]


def success_lines(cfg: Config, prompt: Prompt, reward: float) -> Iterator[str]:
    """Yield a warning where the reference answer earns something other than what `eval/accuracy` counts as right."""
    if cfg.reward.group_terms:
        return
    if cfg.eval is not None and prompt.answer and reward > 0 and not math.isclose(reward, cfg.success_at):
        yield (
            f"warning: eval/accuracy counts a reward of {cfg.success_at:g} or more as right, and the reference answer "
            f"gets {reward:g}; if that is the best reward, set eval.success_at = {reward:g}"
        )


def _environment_lines(cfg: Config) -> Iterator[str]:
    """Yield the tools that the policy is shown, and what their sandbox cannot stop."""
    if cfg.environment is None:
        return
    with open_environments(cfg.environment) as environments:
        names = ", ".join(tool["function"]["name"] for tool in environments.tools) or "none"
        yield f'environment "{cfg.environment.source.kind}", reset with the first prompt; tools: {names}'
        yield from (f"environment.sandbox: {sentence}" for sentence in environments.unprotected)


def _switches(cfg: Config) -> Sequence[str]:
    """What `true_on_policy` changes."""
    if not cfg.true_on_policy:
        return ()
    device_type = default_device_type()
    return operators_of(kernel_of_run(cfg, device_type, compute_dtype(cfg.model.compute_dtype, device_type))).switches


def prepare(argv: Sequence[str]) -> None:
    """Import what a command line asks for, in the process that ranks are forked from."""
    import_libraries(Config, *argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return run_from_command_line(Config, train, check, argv)


if __name__ == "__main__":
    sys.exit(main())
