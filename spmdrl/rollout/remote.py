"""Rollouts that other ranks sample, as a rank that trains receives them; `rollout/serve.py` sends them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmdrl.algo.metrics import Metrics, merge_all
from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.config.strict import as_written
from spmdrl.dist.collectives import Link, gather_objects
from spmdrl.dist.session import shared_store
from spmdrl.engine.remote import ANNOUNCED, HELD_OUT, ORDERS, PROBES, ROLLOUTS, EndOfRun, Shutdown
from spmdrl.faults.watch import StopRequest
from spmdrl.rewards.client import Pending, Rewarded, known_reward
from spmdrl.rollout.codec import Codec
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.sampler import Sampler
from spmdrl.run import Launch


@dataclass(frozen=True, slots=True)
class RolloutShard:
    """One engine's part of a step, for one rank that trains."""

    outcomes: list[Rewarded]  # whole groups, in order
    metrics: Metrics  # for the first rank that trains; empty for the others
    places: Mapping[int, int]  # of every rank's groups in the step's global order, by prompt_id
    group_size: int
    state: Mapping[str, Any] | None  # of the collector after this step; for the first rank that trains
    messages: tuple[str, ...]  # for the user
    stop_request: StopRequest | None  # of the ranks that hold engines


_SHARD = Codec[RolloutShard](RolloutShard)


def sampled_ahead(saved: Mapping[str, Any] | None, plan: Plan) -> RolloutShard | None:
    """Read the step after a checkpoint's, which the engines had sampled when it was saved; None where they had not, or
    may not any more."""
    if saved is None or saved.get("ahead") is None or plan.steps_ahead != 1:
        return None
    with as_written("collector.json", "a run"):
        return _SHARD.load(saved["ahead"])


class RemoteSampler(Sampler):
    """Receives rollouts from the ranks that hold engines, with their rewards."""

    def __init__(self, run: Launch[Config]) -> None:
        plan, meshes = run.plan, run.meshes
        self._plan, self._training = plan, meshes.training
        self._leaders = range(plan.training_ranks, plan.num_ranks, run.cfg.rollout.tp_size)  # ranks that lead engines
        self._message, self._watch = run.report.message, run.watch
        self._engines = range(plan.training_ranks, plan.num_ranks)
        self._orders, self._sends_orders = Link(meshes.world, ORDERS), meshes.training.get_local_rank() == 0
        self._rollouts, self._held_out = Link(meshes.world, ROLLOUTS), Link(meshes.world, HELD_OUT)
        self._probes = Link(meshes.world, PROBES)
        # By step, of the last that was collected and the one before.
        self._states: dict[int, Mapping[str, Any] | None] = {0: None}
        self._parts: dict[int, list[RolloutShard]] = {}  # by step: the last that was received

    def collect(self, step: int) -> Collected:
        """Wait until the engines have sampled the step."""
        parts = self._received(step)
        self._states = {step - 1: self._states[step - 1], step: parts[0].state}
        self._watch.request_stop(parts[0].stop_request)
        for message in parts[0].messages:
            self._message(message)
        outcomes = [outcome for part in parts for outcome in part.outcomes]
        return Collected(
            pending=[known_reward(*outcome) for outcome in outcomes],
            metrics=merge_all([part.metrics for part in parts]),
            places=parts[0].places,
            group_size=parts[0].group_size,
            # Sampled after the last refit: a step that was sampled ahead does not use the newest weights.
            probes=[probe for rank in self._leaders for probe in self._probes.receive(source=rank)],
        )

    def sample_held_out(self) -> list[Pending]:
        """Receive the responses, which the engines sample after the refit, alongside rollouts where they can."""
        return [known_reward(*outcome) for rank in self._leaders for outcome in self._held_out.receive(source=rank)]

    def state(self, step: int) -> Mapping[str, Any] | None:
        """One step ahead, the state has the rollouts of the next step too: the engines sample it with weights that are
        gone when the run resumes. They have finished it, or will before they need newer ones."""
        state = self._states[step]
        if self._plan.steps_ahead != 1 or step >= self._plan.num_steps:
            return state
        parts = self._received(step + 1)
        everyones = gather_objects(self._training, [outcome for part in parts for outcome in part.outcomes])
        whole = dataclasses.replace(
            parts[0],
            outcomes=[
                (dataclasses.replace(rollout, prompt=dataclasses.replace(rollout.prompt, metadata={})), outcome)
                for outcomes in everyones
                for rollout, outcome in outcomes
            ],
            metrics=merge_all([part.metrics for part in parts]),
            messages=(),
            stop_request=None,
        )
        return None if state is None else {**state, "ahead": _SHARD.dump(whole)}

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """The ranks that hold engines read the saved state themselves."""
        self._states = {step: saved}
        if (ahead := sampled_ahead(saved, self._plan)) is not None:
            rank, count = self._training.get_local_rank(), self._training.size()
            mine = [one for one in ahead.outcomes if ahead.places[one[0].prompt.prompt_id] % count == rank]
            metrics = ahead.metrics if rank == 0 else {}
            self._parts = {step + 1: [dataclasses.replace(ahead, outcomes=mine, metrics=metrics)]}

    def _received(self, step: int) -> list[RolloutShard]:
        """Receive what the engines have sampled for a step, once."""
        if step not in self._parts:
            self._parts = {step: [self._rollouts.receive(source=rank) for rank in self._leaders]}
        return self._parts[step]

    def dismiss(self) -> None:
        """Receive what the engines have sampled ahead, so that they can end."""
        if self._sends_orders:
            shared_store().add(ANNOUNCED, 1)
        for rank in self._engines if self._sends_orders else ():
            self._orders.send(EndOfRun(), to=rank)
        for link in (self._rollouts, self._probes, self._held_out):
            for rank in self._leaders:
                while not isinstance(link.receive(source=rank), Shutdown):
                    pass
        self._orders.settle()
