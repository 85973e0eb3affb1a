"""The rollouts of a step and of an evaluation, as the loop asks for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from spmdrl.algo.metrics import Max
from spmdrl.config import Config, RefitConfig
from spmdrl.config.rewards import POLICY
from spmdrl.data.tokenizer import decode
from spmdrl.dist.session import shared_store
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.start import Restarts
from spmdrl.envs.client import open_environments
from spmdrl.report.files import StepRowsFile, read_rows
from spmdrl.rewards.client import Pending
from spmdrl.rewards.judge import Cache
from spmdrl.rollout.clock import RefitInFlight
from spmdrl.rollout.collect import Collected, Collector
from spmdrl.rollout.concurrent_eval import HeldOutAnswers, Rewarding, as_they_are
from spmdrl.rollout.curriculum import curriculum_of
from spmdrl.rollout.env_context import EnvContext, open_env_context
from spmdrl.rollout.episode import Episode
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.part import CollectionRules, EnginePlace, GroupSource, training_rules
from spmdrl.rollout.policy_judge import PolicyJudge
from spmdrl.rollout.sampling import eval_sampling, training_sampling
from spmdrl.rollout.scheduler import EpisodeScheduler, RestoreImages, sample
from spmdrl.run import Launch
from spmdrl.types import Rollout, UserError

MAX_PROBE_TOKENS = 32  # per answer, so that the probe does not lengthen the step
PROBE_PROMPTS = 2  # where the settings name no number and tokens can be stale


class Sampler:
    """Samples the rollouts of each step, wherever the engines are; this base class has none, and samples nothing.

    Every rank that trains has one and calls its methods together with the others.
    """

    answers_beside = False  # whether the rollouts of a step are sampled alongside responses to held-out prompts

    def collect(self, step: int) -> Collected:
        """Sample the rollouts of a step, whose rewards are being computed, and answers to the probe by the weights that
        the step updates."""
        raise AssertionError("this run samples nothing")

    def sample_held_out(self) -> list[Pending]:
        """Sample this rank's part of the responses to held-out prompts with the weights of the last refit."""
        raise AssertionError("this run answers no held-out prompts")

    def ask_held_out(self, deliver: Callable[[Sequence[Pending]], None]) -> None:
        """Have this rank's part of them sampled alongside the next rollouts, and delivered as soon as they are
        rewarded."""
        raise AssertionError("this run answers no held-out prompts beside rollouts")

    def state(self, step: int) -> Mapping[str, Any] | None:
        """Return what a checkpoint must hold to continue after `step`, the last that was collected or the one before.

        The first rank always returns it; others may return None.
        """
        return None

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue after `step` from a saved state; None when none was saved."""

    def dismiss(self) -> None:
        """End: no more rollouts will be collected."""


class LocalSampler(Sampler):
    """Samples with this rank's own engine."""

    def __init__(
        self, run: Launch[Config], engine: RolloutEngine, restarts: Restarts, *, message: Callable[[str], None]
    ) -> None:
        """`message` shows the user a line."""
        cfg, meshes, prompts = run.cfg, run.meshes, run.inputs.prompts
        self._cfg, self._engine, self._restarts = cfg, engine, restarts
        self._submit = run.watch.marking_progress(run.rewards.submit)
        self._held_out = run.inputs.held_out[meshes.engine_index :: meshes.num_engines] if engine.leads else []
        self._stop_token_ids = run.inputs.stop_token_ids
        self._rules = rules = training_rules(cfg, run.plan)
        # The policy judges when nothing else is sampled.
        self.answers_beside = rules.carries_over and not run.plan.max_judged_tokens
        self._env_context = _open_env_context(run) if engine.leads else None
        self._rewards, self._policy_judge = run.rewards, _open_policy_judge(run, engine)
        self._answers, self._judging = HeldOutAnswers(), ThreadPoolExecutor(1, "judges")
        run.enter(_ending(self._judging))
        sources = prompts, run.inputs.held_out

        def restore_images(episode: Episode) -> None:
            sources[episode in self._answers].restore(episode.prompt)

        self._restore: RestoreImages | None = restore_images if run.inputs.images.store is not None else None
        self._collector = Collector(
            EnginePlace(engine, meshes.engine_index, meshes.num_engines, meshes.engines, restarts),
            GroupSource(
                prompts,
                training_sampling(cfg, self._stop_token_ids),
                cfg.run.seed,
                self._submit,
                self._env_context,
                self._restore,
                curriculum_of(cfg, prompts),
            ),
            rules,
            store=None if cfg.run.deterministic else shared_store(),
            clocks=shared_store() if cfg.run.deterministic else None,
            message=message,
            record=self._record,
            follows=_followed_schedule(cfg),
            held_out=self._answers,
        )
        # The first engine writes it, from where the run begins.
        writes = rules.can_be_stale and engine.leads and meshes.engine_index == 0
        self._schedule_path = run.folder.schedule if writes else None
        self._schedule: StepRowsFile | None = None
        self._probes = prompts.take(0, _num_probes(cfg.refit, rules)) if engine.leads else []

    def collect(self, step: int) -> Collected:
        """Sample a step, finish the evaluation alongside it, then answer the probe; engines that die are restarted."""
        collected = self.collect_alone(step)
        self.finish_held_out()
        probes = self._restarts.carry(self.answer_probes, during=f"the probe of step {step}")
        metrics = dict(collected.metrics)
        if self._restarts.wanted:
            metrics["rollout/engine_restarts_count"] = Max(float(self._restarts.take_count()))
        return dataclasses.replace(collected, probes=probes, metrics=metrics)

    def collect_alone(self, step: int, in_flight: RefitInFlight | None = None) -> Collected:
        """Sample the rollouts of a step without the probe, with a refit `in_flight` if one comes meanwhile, and ask
        judges that wait for its groups."""
        collected = self._collector.collect(step, in_flight)
        return collected.with_pending(self._judged(collected.pending, during=f"the judgments of step {step}"))

    def answer_probes(self) -> list[Rollout]:
        """Sample this engine's answers to the first prompts of the stream, with the same noise every time; one response
        to each, whatever an environment would say to it."""
        sampling = training_sampling(self._cfg, self._stop_token_ids)
        limit = min(MAX_PROBE_TOKENS, sampling.max_response_tokens)
        short = dataclasses.replace(sampling, group_size=1, max_response_tokens=limit)
        seed, restore = self._cfg.run.seed, self._restore
        return sample(
            self._engine, self._probes, short, None, lambda x: x, run_seed=seed, step=0, restore_images=restore
        )

    def sample_held_out(self) -> list[Pending]:
        found: list[Pending] = []
        self._ask(found.extend, as_they_are)
        self._restarts.carry(self.finish_held_out, during="an evaluation")
        return self._judged(found, during="the judgments of an evaluation")

    def ask_held_out(self, deliver: Callable[[Sequence[Pending]], None]) -> None:
        # Only a judge that is the policy itself cannot be asked meanwhile.
        self._ask(deliver, lambda pending: self._judging.submit(self._rewards.complete, pending))

    def _ask(
        self, deliver: Callable[[Sequence[Pending]], None], complete: Callable[[list[Pending]], Future[list[Pending]]]
    ) -> None:
        sampling, seed = eval_sampling(self._cfg, self._stop_token_ids), self._cfg.run.seed
        groups = [  # step 0: the same noise at every evaluation
            PromptGroup.opened(prompt, sampling, self._env_context, step=0, run_seed=seed) for prompt in self._held_out
        ]
        self._answers.ask(groups, Rewarding(self._submit, complete), deliver)

    def finish_held_out(self) -> None:
        """Deliver what was asked for and is not delivered yet; it is sampled now where no step was."""
        if self._answers.is_sampling:
            EpisodeScheduler(
                self._engine,
                restore_images=self._restore,
                in_order=self._rules.in_order,
                max_open=self._rules.max_open,
            ).run(self._answers.episodes, self._answers.add)
        self._answers.deliver(waits=True)

    def _judged(self, pending: list[Pending], *, during: str) -> list[Pending]:
        """Add the parts of rewards that wait for groups; the policy is asked while its engine is awake."""
        if not self._cfg.reward.group_judges:
            return pending
        return self._restarts.carry(lambda: self._rewards.complete(pending, self._policy_judge), during=during)

    def state(self, step: int) -> Mapping[str, Any]:
        return self._collector.state(step)

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        self._collector.restore(saved, step=step)
        if self._schedule_path is not None:
            self._schedule = StepRowsFile(self._schedule_path, start_step=step)

    def _record(self, step: int, schedule: Mapping[str, Any]) -> None:
        if self._schedule is not None:
            self._schedule.write(step, [schedule])


@contextmanager
def _ending(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Surround a run, at whose end nothing of the pool is waited for: closing the reward client ends what it asks."""
    try:
        yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _open_env_context(run: Launch[Config]) -> EnvContext | None:
    if run.cfg.environment is None:
        return None
    client = run.enter(open_environments(run.cfg.environment))
    inputs = run.inputs
    return open_env_context(run.cfg, client, inputs.tokenizer, inputs.stop_token_ids, inputs.images)


def _open_policy_judge(run: Launch[Config], engine: RolloutEngine) -> PolicyJudge | None:
    if not run.cfg.reward.max_judged_tokens:
        return None
    said = run.enter(closing(Cache(run.folder.judged / POLICY)))
    inputs = run.inputs
    read = run.watch.marking_progress(partial(decode, inputs.tokenizer))
    return PolicyJudge(engine, inputs.tokenizer, inputs.stop_token_ids, run.cfg, said, read)


def _followed_schedule(cfg: Config) -> dict[int, Mapping[str, Any]] | None:
    """Read what `debug.follow_schedule` names, by step. Raises UserError when it is damaged or not there."""
    if cfg.debug.follow_schedule is None:
        return None
    path = Path(cfg.debug.follow_schedule)
    if not path.is_file():
        raise UserError(f"debug.follow_schedule = {path} is not there; set it to the schedule.jsonl of a run")
    return {row["step"]: row for row in read_rows(path)}


def _num_probes(refit: RefitConfig, rules: CollectionRules) -> int:
    if refit.probe_prompts is not None:
        return refit.probe_prompts
    return PROBE_PROMPTS if rules.can_be_stale else 0
