"""The Python face: a run from a script, and the four calls of a loop of one's own.

    Trainer(load_config("run.toml")).train()                # what `python -m spmdrl.train run.toml` does

    with Trainer(load_config("run.toml")).loop() as loop:
        for step in loop:
            rollouts = loop.sample()
            loop.forward_backward(rollouts, advantages, loss)
            loop.optim_step()

A script runs on every rank, by `torchrun --nproc-per-node N script.py`; each call is made by all of them together. What
belongs between steps stays what the configuration says: evaluation, checkpoints, metrics, going on after a stop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from spmdrl import checkpoint
from spmdrl.algo.metrics import Metrics, merge_all, scalars
from spmdrl.algo.seeds import mix
from spmdrl.algo.sequences import on_tokens
from spmdrl.config import Config, read_config
from spmdrl.config.plan import router_lines
from spmdrl.dist.collectives import gather_objects, merge_over
from spmdrl.dist.launcher import require_launch_environment
from spmdrl.dist.session import are_restarted, launched_ranks
from spmdrl.engine.start import start_engine
from spmdrl.learn.coefficients import adapt_coefficients
from spmdrl.learn.learner import POLICY, start_learners
from spmdrl.learn.source_objective import policy_objective
from spmdrl.learn.update import Accumulated, follow, forward_backward, optimizer_step
from spmdrl.model.offload import TrainerMemory
from spmdrl.model.routes import routes_refusal
from spmdrl.model.sharding import reshard
from spmdrl.preflight.hub import located
from spmdrl.preflight.inputs import open_inputs, raise_all
from spmdrl.refit.refit import make_refit
from spmdrl.report import RunFolder
from spmdrl.rollout.start import start_sampler
from spmdrl.run import Callback, Launch, open_launch
from spmdrl.step.advantages import add_advantages
from spmdrl.step.batch import Batch, build_batch, to_sequences
from spmdrl.step.correction import correct, select_by_covariance
from spmdrl.step.handover import start_handover
from spmdrl.step.images import start_images
from spmdrl.step.logprobs import add_logprobs
from spmdrl.step.rewards import failure_lines, limit_failures, shape_rewards, step_metrics
from spmdrl.step.samples import gather_samples
from spmdrl.step.scores import Scorers
from spmdrl.step.steps import Steps
from spmdrl.step.teachers import FrozenModels
from spmdrl.train import train
from spmdrl.types import MicroBatch, RewardedRollout, UserError


def load_config(path: str, *overrides: str) -> Config:
    """Read a configuration; overrides are texts such as "optim.lr=3e-4". Raises UserError with every mistake in it."""
    return read_config(Config, path, overrides)


class Trainer:
    """A run, which a script starts on every rank."""

    def __init__(self, cfg: Config, callbacks: Sequence[Callback] = ()) -> None:
        """`callbacks` are called in this order at the edges of the run, on every rank with the same values."""
        self._cfg, self._callbacks = cfg, tuple(callbacks)

    def train(self) -> None:
        """Train to the last step, or until the run is asked to stop, from the newest checkpoint on.

        Raises UserError for what is wrong with the settings, before anything is started.
        """
        with self._launched() as run:
            train(run)

    @contextmanager
    def loop(self) -> Iterator[Loop]:
        """Open the run for a loop of the script's own. Raises UserError, as `train` does."""
        raise_all([*_loop_problems(self._cfg)])
        with self._launched() as run, Loop(run).running() as loop:
            yield loop

    @contextmanager
    def _launched(self) -> Iterator[Launch[Config]]:
        require_launch_environment()
        cfg, problems = located(self._cfg)
        raise_all(problems)
        inputs = open_inputs(cfg, num_ranks=launched_ranks())
        folder = RunFolder.of(cfg.run.dir, cfg.run.name, "auto" if are_restarted() else cfg.resume.checkpoint)
        with open_launch(cfg, inputs, folder.create(), callbacks=self._callbacks) as run:
            yield run


def _loop_problems(cfg: Config) -> Iterator[str]:
    if cfg.rollout.placement == "disaggregated":
        yield (
            'rollout.placement = "disaggregated" gives some ranks a loop of their own, and a script has one for all; '
            'set it to "colocated"'
        )
    if cfg.has_critic:
        yield (
            f'advantage.estimator = "{cfg.advantage.estimator}" trains a critic, which a loop of one\'s own has not; '
            "set another estimator"
        )
    if cfg.correction.router_replay == "R2":
        yield (
            'correction.router_replay = "R2" replays the pass before all updates of a step, which a loop of one\'s own '
            'decides; set it to "R3" or "none"'
        )
    if cfg.debug.save_rollouts or cfg.debug.load_rollouts is not None:
        yield "[debug] records or reads the rollouts of the run's own loop, not those of a script; remove it"


@dataclass(slots=True)
class _StepCalls:
    """The calls and results of a step so far."""

    number: int
    is_open: bool = True
    has_sampled: bool = False
    wants_save: bool = False
    updates: int = 0
    sampled: list[RewardedRollout] = field(default_factory=list)
    done: Accumulated = field(default_factory=Accumulated)  # since the last optimizer step
    metrics: list[Metrics] = field(default_factory=list)
    advantages: dict[int, float] = field(default_factory=dict)  # of rollouts that were trained on, by index


class Loop:
    """The calls of a loop of one's own; iterating yields the steps that are left. Every rank that trains has one."""

    def __init__(self, run: Launch[Config]) -> None:
        self._run = run
        cfg, plan, meshes, report = run.cfg, run.plan, run.meshes, run.report
        with report.span("load"):
            policy = run.load_policy()
            self._frozen = FrozenModels.of(run, policy, run.inputs.images.store)
            self._learners = start_learners(
                policy, cfg, plan, meshes, dtype=run.dtype, followers=self._frozen.followers
            )
            self._scorers = Scorers(run)
        self._saver = run.enter(closing(checkpoint.start_saver(cfg, run.folder.checkpoints, self._learners, meshes)))
        checkpoint.restore(run.resume_point.folder, self._learners, meshes.training, step=run.resume_point.step)
        trainer = TrainerMemory(list(self._learners.values()), run.device, moves=cfg.offload.trainer)
        trainer.sleep()
        run.watch.enter("start engine")
        engine = run.enter(closing(start_engine(run)))
        self._handover = start_handover(run, trainer, engine, make_refit(policy, engine, meshes, cfg, dtype=run.dtype))
        self._sampler = start_sampler(run, engine, self._handover.restarts)
        self._images = start_images(run, policy)
        self._steps = Steps(
            run,
            policy,
            self._saver,
            self._handover,
            self._sampler,
            warn=cfg.mismatch.warn,
            success_at=cfg.success_at,
            complete=self._scorers.complete,
            alongside=False,  # a script may sample nothing in a step
        )
        self._router_lines = router_lines(cfg, has_routes=routes_refusal(policy.model) is None)
        self._awake, self._is_awake = ExitStack(), False  # while the trainer has the device
        # Rollouts may come without the others of their groups.
        self._one_update = replace(plan, prompts_per_step=plan.rollouts_per_step, updates_per_step=1)
        self._now = _StepCalls(run.resume_point.step, is_open=False)

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each step that is left. A step ends when the next is asked for: it is then reported,
        evaluated and saved where the settings say so. Ends where the run is asked to stop."""
        for step in self._steps:
            self._now = _StepCalls(step)
            yield step
            self._end()

    @contextmanager
    def running(self) -> Iterator[Loop]:
        """Surround the loop; ends it in order when the run is asked to stop, and a step that was left by `break`."""
        self._steps.announce(self._router_lines)
        self._handover.refit(version=self._run.resume_point.step)
        with self._steps.until_stopped(), self._awake:
            yield self
            self._end()

    def sample(self) -> list[RewardedRollout]:
        """Sample the step's prompt groups with the newest weights; returns this rank's groups, with their rewards.

        Raises UserError when a step samples twice.
        """
        run, cfg = self._run, self._run.cfg
        if self._now.has_sampled:
            raise UserError(f"step {self._now.number} has called sample() twice; sample once in each step")
        self._now.has_sampled = True
        with run.report.span("rollout"), self._handover.rollout():
            collected = self._sampler.collect(self._now.number)
        with self._steps.phase("reward"):
            collected = collected.with_pending(self._scorers.complete(collected.pending))
            rewarded = shape_rewards(run.rewards.collect(collected.pending), collected.index_of, cfg)
        run.watch.note_all(failure_lines(self._now.number, rewarded), show=run.report.message)
        limit_failures(rewarded, cfg.reward, run.meshes.training, step=self._now.number)
        self._now.sampled = rewarded
        self._now.metrics += [collected.metrics, step_metrics(rewarded, cfg)]
        return rewarded

    def forward_backward(
        self,
        rollouts: Sequence[RewardedRollout],
        advantages: Sequence[float] | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        """Add the gradient of the loss on these rollouts of this rank to those that are there.

        The rollouts of all ranks are balanced over them and packed. `advantages` has one for each; None: those of
        `advantage.estimator`, which needs whole groups. `loss` is called as a function that `loss.kind` names; None:
        the loss of the settings. After an `optim_step` in the same step the ratio's old log-probabilities are the
        engine's. Every rank calls it, also with no rollouts.
        """
        cfg, meshes = self._run.cfg, self._run.meshes
        with self._phase("batch"):
            self._images.restore([one.rollout for one in rollouts])
            sequences = to_sequences(rollouts, meshes.training, self._frozen.label, **cfg.sequences)
            batch = build_batch(sequences, self._one_update, meshes, **cfg.weighting)
        self._wake()
        batch, _, vision_metrics = self._images.encode_batch(batch, [])
        policy = self._learners[POLICY]
        with self._phase("logprobs"):
            batch = add_logprobs(batch, self._learners, self._frozen, cfg, meshes)
            if self._now.updates:
                batch = batch.with_micro_batches(
                    one.with_columns({"old_logprobs": one.rollout_logprobs}) for one in batch.micro_batches
                )
            if advantages is None:
                batch = add_advantages(batch, cfg, policy.coefficients, meshes)
            else:
                batch = self._with_advantages(batch, rollouts, advantages)
            batch = correct(batch, cfg, meshes)
            batch = select_by_covariance(batch, cfg.losses, meshes, seed=mix(cfg.run.seed, self._now.number))
        objective = policy.objective
        if loss is not None:
            longest = self._run.plan.max_sequence_tokens
            objective = policy_objective(cfg, policy.coefficients, longest_tokens=longest, function=loss)
        with self._phase("update"), self._frozen.teaching():
            for mini_batch in batch.mini_batches:
                forward_backward(policy, objective, mini_batch, meshes, self._now.done)
        self._now.advantages |= batch.advantages
        self._now.metrics += [vision_metrics, batch.metrics]

    def optim_step(self) -> dict[str, float]:
        """Take an optimizer step with the gradients that are there; returns its metrics, the same on every rank.

        The learning rate is that of the settings' schedule. Without any gradient no weight changes.
        """
        if not self._now.done.losses:
            return {}
        per_step, first = self._run.plan.updates_per_step, (self._now.number - 1) * self._run.plan.updates_per_step
        number = first + min(self._now.updates + 1, per_step)
        meshes, policy = self._run.meshes, self._learners[POLICY]
        result = optimizer_step(
            policy, self._now.done, meshes, step=self._now.number, number=number, is_first=not self._now.updates
        )
        reshard(policy.model)
        self._now.done, self._now.updates = Accumulated(), self._now.updates + 1
        metrics = result.metrics if meshes.is_data_leader else {}
        self._now.metrics.append(metrics)
        return scalars(merge_over(meshes.training, merge_all([metrics])))

    def save(self) -> None:
        """Save a checkpoint after this step, besides those of `checkpoint.every`."""
        self._now.wants_save = True

    def _end(self) -> None:
        """End the step: the new weights go to the engine, then what is due is evaluated, reported and saved."""
        if not self._now.is_open:
            return
        run, policy, step = self._run, self._learners[POLICY], self._now.number
        self._now.is_open = False
        policy.optimizer.zero_grad(set_to_none=True)
        if policy.followers:
            self._wake()
            follow(policy, step=step)
        self._awake.close()
        with run.report.span("refit"):
            self._handover.refit(version=step)
        self._steps.evaluate(step)
        shown = [one for one in self._now.sampled if one.index in self._now.advantages]
        samples = gather_samples(shown, self._now.advantages, run.inputs.tokenizer, run.cfg.report, run.meshes.training)
        values = self._steps.report(step, self._now.metrics, samples=samples)
        adapt_coefficients(policy.coefficients, values, run.cfg, rollouts=run.plan.rollouts_per_step)
        self._steps.finish(step, values, save=self._now.wants_save)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """A phase; where no weights have changed in this step, all ranks may agree to stop before it."""
        return self._run.report.span(name) if self._now.updates else self._steps.phase(name)

    def _wake(self) -> None:
        """Give the trainer the device until the step ends."""
        if not self._is_awake:
            self._awake.enter_context(self._handover.training())
            self._awake.callback(setattr, self, "_is_awake", False)
            self._is_awake = True

    def _with_advantages(self, batch: Batch, rollouts: Sequence[RewardedRollout], advantages: Sequence[float]) -> Batch:
        own = {one.index: float(advantage) for one, advantage in zip(rollouts, advantages, strict=True)}
        parts = gather_objects(self._run.meshes.training, own)
        everyones = {index: advantage for part in parts for index, advantage in part.items()}

        def completed(micro_batch: MicroBatch) -> MicroBatch:
            values = torch.tensor([everyones.get(index, 0.0) for index in micro_batch.sequence_index])
            column = on_tokens(values, micro_batch.cu_seqlens, len(micro_batch.token_ids)) * micro_batch.loss_mask
            return micro_batch.with_columns({"advantages": column})

        return replace(batch.with_micro_batches(map(completed, batch.micro_batches)), advantages=everyones)
