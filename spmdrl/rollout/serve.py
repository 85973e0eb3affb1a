"""The loop of the ranks that only hold engines. The ranks that train run `train.py`, with the sampler of `remote.py`.

    refit -> [ (refit)... -> rollout with eval -> reward -> deliver ] x num_steps -> (refit -> (eval))...

until the ranks that train end it. A step is sampled as soon as the weights are fresh enough: at most
`plan.steps_ahead` steps older than those a colocated run would use. With 0 or 1 that decides which weights sample which
step; with more, a refit that was announced during one step is received before the next. With `rollout.refit_in_flight`
each step begins with weights one step older than those and pauses once to receive the newer ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from spmdrl import checkpoint
from spmdrl.algo.metrics import Max, Metrics, merge_all
from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.dist.collectives import Link, gather_objects
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import shared_store
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.remote import (
    ANNOUNCED,
    FIRST,
    HELD_OUT,
    ORDERS,
    PROBES,
    REPLIES,
    ROLLOUTS,
    AdapterOrder,
    EndOfRun,
    RefitOrder,
    Shutdown,
    expected_by,
)
from spmdrl.engine.start import Restarts, start_engine
from spmdrl.faults.watch import StopRequest
from spmdrl.refit.bucket import Bucket
from spmdrl.refit.digest import digest
from spmdrl.refit.refit import require_equal
from spmdrl.report.report import drop_metrics
from spmdrl.rewards.client import Pending, Rewarded
from spmdrl.rollout.clock import RefitInFlight
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.remote import RolloutShard, sampled_ahead
from spmdrl.rollout.sampler import LocalSampler
from spmdrl.run import Launch
from spmdrl.types import Rollout, TrainingDiverged, UserError


def serve(run: Launch[Config]) -> None:
    """Hold an engine until the ranks that train end the run.

    Samples every step and evaluation after the one where the run begins, from the state in its checkpoint.
    """
    plan, meshes, watch = run.plan, run.meshes, run.watch
    step, prompts = run.resume_point.step, run.inputs.prompts
    engine = run.enter(closing(start_engine(run)))
    messages: list[str] = []
    sender = _RolloutSender(plan, engine, meshes)
    weights = _RefitReceiver(engine, meshes, with_adapters=run.cfg.sends_adapters)
    with sender.reporting_problems(weights), sender.ending(weights):
        restarts = Restarts(meshes.engines, None, message=messages.append)
        sampler = LocalSampler(run, engine, restarts, message=messages.append)
        saved = checkpoint.collector_state(run.resume_point.folder, step=step)
        ahead = sampled_ahead(saved, plan)
        sampled = step if ahead is None else step + 1
        sampler.restore(saved if ahead is None else ahead.state, step=sampled)

        # In step, a deterministic run samples what a colocated one does, in the same batches; and the policy as a judge
        # of answers is asked when its engine has nothing else to do.
        in_step = run.cfg.run.deterministic and not plan.steps_ahead
        always_alone = in_step or plan.max_judged_tokens > 0

        def refit(*, alone: bool = always_alone) -> None:
            watch.enter("refit")
            sampler.finish_held_out()
            weights.receive()
            watch.enter("eval")
            if engine.version < plan.num_steps:
                sender.probes(sampler.answer_probes())
            if not plan.evaluates_after(engine.version):
                return
            is_known = engine.version == step and run.resume_point.is_evaluated

            def deliver_unless_known(pending: Sequence[Pending]) -> None:
                if not is_known:
                    sender.held_out(run.rewards.collect(pending))

            if not alone and (run.cfg.run.deterministic or not is_known):
                # Where it is known, the rollouts alongside it have the batches and the clock of before the stop.
                sampler.ask_held_out(deliver_unless_known)
            elif not is_known:
                deliver_unless_known(sampler.sample_held_out())

        def refit_and_go_on() -> None:
            refit()
            watch.enter("rollout")

        in_flight = RefitInFlight(weights.is_announced, refit_and_go_on) if run.cfg.rollout.refit_in_flight else None
        # In flight, the evaluation of a checkpoint was sampled alongside rollouts that the checkpoint has.
        refit(alone=always_alone or (in_flight is not None and ahead is not None))
        for number in range(sampled + 1, plan.num_steps + 1):
            while engine.version < number - 1 - plan.steps_ahead or (plan.steps_ahead > 1 and weights.are_announced()):
                refit()
            watch.begin_step(number)
            watch.enter("rollout")
            began, dropped = time.perf_counter(), prompts.dropped
            collected = sampler.collect_alone(number, in_flight if engine.version < number - 1 else None)
            watch.enter("reward")
            sampler.finish_held_out()
            outcomes = run.rewards.collect(collected.pending)
            watch.enter("deliver")
            metrics = merge_all(
                [
                    collected.metrics,
                    drop_metrics(dropped, prompts.dropped),
                    {"time/sampling_s": Max(time.perf_counter() - began)},
                ]
            )
            requests = gather_objects(meshes.engines, watch.stop_request())
            stop_request = next((request for request in requests if request is not None), None)
            # The state is sent with every step: the ranks that train may stop, and save, after any.
            sender.step(collected, outcomes, metrics, sampler.state(number), messages, stop_request)
            messages.clear()
        while True:  # until the next order is `EndOfRun`
            refit()


class _RefitReceiver:
    """Receives refits on a rank that holds an engine or a part of one."""

    def __init__(self, engine: RolloutEngine, meshes: Meshes, *, with_adapters: bool = False) -> None:
        """`with_adapters`: every refit ends with adapters, and few begin with weights."""
        self._engine, self._meshes, self._with_adapters = engine, meshes, with_adapters
        self._orders, self._replies = Link(meshes.world, ORDERS), Link(meshes.world, REPLIES)
        self._replies_for_all = meshes.engines.get_local_rank() == 0
        self._buckets: Sequence[Bucket] = ()
        self._received = 0

    def is_announced(self) -> bool:
        """Return True when the ranks that train have announced a refit, or the end of the run. Any thread may call
        this."""
        return shared_store().add(ANNOUNCED, 0) > self._received

    def are_announced(self) -> bool:
        """Return what `is_announced` does, the same on every rank that holds an engine."""
        return gather_objects(self._meshes.engines, self._replies_for_all and self.is_announced())[0]

    def receive(self) -> None:
        """Wait for the next refit and receive it. Raises EndOfRun when there will be none."""
        order = self._next_order()
        if isinstance(order, RefitOrder):
            self._receive_weights(order)
            if not self._with_adapters:
                return
            order = self._next_order()
        assert isinstance(order, AdapterOrder), "after its base an engine gets adapters"
        self._take_adapters(order)

    def _next_order(self) -> RefitOrder | AdapterOrder:
        order: RefitOrder | AdapterOrder | EndOfRun = self._orders.receive(source=FIRST)
        if isinstance(order, EndOfRun):
            raise order
        return order

    def _take_adapters(self, order: AdapterOrder) -> None:
        """Raises RefitMismatch on every rank that holds an engine when an engine does not hold what was sent."""
        adapters = order.adapters
        differing = self._engine.load_adapters(adapters)
        if digest(adapters.flat) != order.digest:
            differing = list(adapters.tensors)  # they were changed on their way
        require_equal(self._meshes.engines, differing, version=adapters.version)
        self._engine.require_alive()
        self._received += 1

    def _receive_weights(self, order: RefitOrder) -> None:
        self._buckets = order.buckets or self._buckets
        # All are here: with the reply the ranks that train begin to send.
        gather_objects(self._meshes.engines, None)
        self._reply(None)
        self._engine.begin_update(self._buckets, (), version=order.version)
        for number in range(len(self._buckets)):
            self._engine.load(number)
            self._engine.wait()
            self._engine.require_alive()  # now: the ranks that train wait until this bucket is received
        self._engine.end_update()
        self._engine.require_alive()
        self._received += 1
        expected = self._orders.receive(source=FIRST)
        if expected is not None:
            mine = expected_by(self._meshes.engine.get_local_rank(), expected)
            differing = gather_objects(self._meshes.engines, self._engine.differing(mine))
            self._reply(sorted({name for names in differing for name in names}))

    def settle(self) -> None:
        """Wait until the last reply has been received."""
        self._replies.settle()

    def give_up(self, problem: Exception) -> None:
        """Answer the next order with the problem."""
        self._reply(problem)
        self._replies.settle_if_possible()

    def _reply(self, what: Any) -> None:
        if self._replies_for_all:
            self._replies.send(what, to=FIRST)


class _RolloutSender:
    """Sends rollouts and their rewards to the ranks that train. Each gets whole groups; which ones does not matter,
    because batches are laid out over all ranks later."""

    def __init__(self, plan: Plan, engine: RolloutEngine, meshes: Meshes) -> None:
        self._receivers = range(plan.training_ranks) if engine.leads else range(0)
        # Before a step is sampled, all but the last `steps_ahead` have been received: see `serve`.
        self._rollouts = Link(meshes.world, ROLLOUTS, in_flight=plan.steps_ahead + 1)
        self._held_out, self._probes = Link(meshes.world, HELD_OUT), Link(meshes.world, PROBES)

    def step(
        self,
        collected: Collected,
        outcomes: Sequence[Rewarded],
        metrics: Metrics,
        state: Mapping[str, Any] | None,
        messages: Sequence[str],
        stop_request: StopRequest | None,
    ) -> None:
        """Send the rollouts of a step."""
        for rank in self._receivers:
            is_first = rank == FIRST
            shard = RolloutShard(
                outcomes=[
                    (rollout, outcome)
                    for rollout, outcome in outcomes
                    if collected.places[rollout.prompt.prompt_id] % len(self._receivers) == rank
                ],
                metrics=metrics if is_first else {},
                places=collected.places,
                group_size=collected.group_size,
                state=state if is_first else None,
                messages=tuple(messages) if is_first else (),
                stop_request=stop_request,
            )
            self._rollouts.send(shard, to=rank)

    def held_out(self, outcomes: Sequence[Rewarded]) -> None:
        """Send the rollouts of an evaluation."""
        self._scatter(outcomes, self._held_out)

    def probes(self, rollouts: Sequence[Rollout]) -> None:
        """Send the answers to the probe; the ranks that train receive them with the rollouts of the next step."""
        self._scatter(rollouts, self._probes)

    def _scatter(self, values: Sequence[Any], link: Link) -> None:
        for rank in self._receivers:
            link.send(list(values[rank :: len(self._receivers)]), to=rank)

    @contextmanager
    def ending(self, weights: _RefitReceiver) -> Iterator[None]:
        """When the ranks that train end the run, send a last value on every channel."""
        try:
            yield
        except EndOfRun:
            for rank in self._receivers:
                for link in (self._rollouts, self._probes, self._held_out):
                    link.send(Shutdown(), to=rank)
            weights.settle()
            self.settle()

    def settle(self) -> None:
        """Wait until everything has been received."""
        for link in (self._rollouts, self._probes, self._held_out):
            link.settle()

    @contextmanager
    def reporting_problems(self, weights: _RefitReceiver) -> Iterator[None]:
        """Send what stops this rank to the ranks that train, whatever they wait for next."""
        try:
            yield
        except (UserError, TrainingDiverged) as problem:
            for rank in self._receivers:
                for link in (self._rollouts, self._held_out):
                    link.send(problem, to=rank)
            weights.give_up(problem)
            for link in (self._rollouts, self._probes, self._held_out):
                link.settle_if_possible()
            raise
