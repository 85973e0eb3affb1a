"""What the loop asks of those who sample, wherever they are: the rollouts of a step, and of an evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from spmdrl.algo.metrics import Max
from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.data.stream import PromptStream
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import shared_store
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.restart import Restarts
from spmdrl.rewards.client import Pending
from spmdrl.rollout.collect import Collected, Collector, training_drawing
from spmdrl.rollout.sample import eval_sampling, sample, training_sampling
from spmdrl.types import Prompt, Rollout

MAX_PROBE_TOKENS = 32  # of one answer, so that the probe does not lengthen the step


class Sampler(Protocol):
    """Every rank that trains has one and calls its methods together with the others."""

    def collect(self, step: int) -> Collected:
        """The rollouts that a step is trained on, being scored, and answers to the probe by the weights it updates."""
        ...

    def sample_held_out(self) -> list[Pending]:
        """This rank's part of the responses to held-out prompts, with the weights of the last refit, being scored."""
        ...

    def state(self, step: int) -> Mapping[str, Any] | None:
        """What a checkpoint must hold to go on after `step`, the last that was collected or the one before; at least
        on the first rank."""
        ...

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """Go on after `step` from a saved state; None when none was saved."""
        ...

    def dismiss(self) -> None:
        """The run ends or stops: nothing more will be asked for."""
        ...


class LocalSampler:
    """A `Sampler` of the ranks that hold the engines."""

    def __init__(
        self,
        cfg: Config,
        plan: Plan,
        engine: RolloutEngine,
        submit: Callable[[Rollout], Pending],
        prompts: PromptStream,
        held_out: Sequence[Prompt],
        stop_token_ids: frozenset[int],
        meshes: Meshes,
        *,
        tell: Callable[[str], None],
        restarts: Restarts,
    ) -> None:
        """`submit` starts the scoring of a finished rollout; `tell` shows the user a line."""
        self._cfg, self._engine, self._submit = cfg, engine, submit
        self._restarts = restarts
        self._held_out = held_out[meshes.engine_index :: meshes.num_engines] if engine.leads else []
        self._stop_token_ids = stop_token_ids
        self._collector = Collector(
            engine,
            submit,
            prompts,
            training_sampling(cfg, stop_token_ids),
            training_drawing(cfg, plan),
            meshes.engines,
            store=None if cfg.run.deterministic else shared_store(),
            engine_index=meshes.engine_index,
            num_engines=meshes.num_engines,
            run_seed=cfg.run.seed,
            tell=tell,
            restarts=self._restarts,
        )
        self._probes = prompts.take(0, cfg.refit.probe_prompts) if engine.leads else []

    def collect(self, step: int) -> Collected:
        """See `Sampler.collect`."""
        collected = self.collect_alone(step)
        probes = self._restarts.carry(self.answer_probes, during=f"the probe of step {step}")
        metrics = dict(collected.metrics)
        if self._restarts.wanted:
            metrics["rollout/engine_restarts_count"] = Max(float(self._restarts.take_count()))
        return dataclasses.replace(collected, probes=probes, metrics=metrics)

    def collect_alone(self, step: int) -> Collected:
        """The same without the probe."""
        return self._collector.collect(step)

    def answer_probes(self) -> list[Rollout]:
        """This engine's answers to the first prompts of the stream: the same noise every time, other weights."""
        sampling = training_sampling(self._cfg, self._stop_token_ids)
        limit = min(MAX_PROBE_TOKENS, sampling.max_response_tokens)
        short = dataclasses.replace(sampling, group_size=1, max_response_tokens=limit)
        return list(sample(self._engine, self._probes, short, run_seed=self._cfg.run.seed, step=0))

    def sample_held_out(self) -> list[Pending]:
        """See `Sampler.sample_held_out`."""
        sampling = eval_sampling(self._cfg, self._stop_token_ids)

        def answer() -> list[Pending]:
            # Step 0: the same noise at every evaluation.
            rollouts = sample(self._engine, self._held_out, sampling, run_seed=self._cfg.run.seed, step=0)
            return [self._submit(rollout) for rollout in rollouts]

        return self._restarts.carry(answer, during="an evaluation")

    def state(self, step: int) -> Mapping[str, Any]:
        """See `Sampler.state`; the same on every rank."""
        return self._collector.state(step)

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """See `Sampler.restore`."""
        self._collector.restore(saved, step=step)

    def dismiss(self) -> None:
        """See `Sampler.dismiss`; it does nothing that it is not asked for."""
