"""The engines as the ranks that train see them, when others hold them: weights go there, scored rollouts come back.

The other end is `rollout/serve.py`. What goes which way:

    orders    first rank that trains -> every rank that holds an engine: a refit begins; what it must have brought
    buckets   the same way, by broadcast
    replies   first rank that holds an engine -> first rank that trains
    rollouts  every rank that leads an engine -> every rank that trains: its part of a step,
              of an evaluation; its answers to the probe, after a refit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.algo.metrics import Metrics, merge_all
from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.dist.link import Link
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import shared_store
from spmdrl.faults.stop_request import StopRequest
from spmdrl.refit.bucket import Bucket
from spmdrl.refit.sink import Naming
from spmdrl.rewards.client import Pending, known_reward
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.sampler import Sampler
from spmdrl.run import Launch
from spmdrl.types import RewardOutcome, Rollout

ORDERS, REPLIES, ROLLOUTS, PROBES, HELD_OUT = range(1, 6)  # channels
FIRST = 0  # the rank that sends weights and hears replies; the first of all, so it trains
ANNOUNCED = "refits_announced"  # a counter in the shared store

Digests = dict[str, str]  # by the engine's name of a weight
Outcome = tuple[Rollout, RewardOutcome]


@dataclass(frozen=True, slots=True)
class RefitOrder:
    """The weights of `version` follow, in these buckets; None: in those of the last order."""

    version: int
    buckets: tuple[Bucket, ...] | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One engine's part of a step, for one rank that trains."""

    outcomes: list[Outcome]  # whole groups, in order
    metrics: Metrics  # for the first rank that trains; empty for the others
    places: Mapping[int, int]  # of every rank's groups in the step's global order, by prompt_id
    group_size: int
    state: Mapping[str, Any] | None  # of the collector after this step; for the first
    messages: tuple[str, ...]  # for the user
    wish: StopRequest | None  # to stop, of ranks that hold engines


def engine_leaders(plan: Plan, *, ranks_per_engine: int) -> range:
    """The ranks that lead engines, disaggregated."""
    return range(plan.training_ranks, plan.num_ranks, ranks_per_engine)


class Dismissed(Exception):
    """The run ends or stops; sent in the place of an order, and raised where it is received."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The last value on its channel from a rank that leads an engine and was dismissed."""


class RemoteEngine:
    """The receiving side of a refit, on a rank that trains; the first of them sends for all.

    It samples nothing, and has nothing to give back or to take.
    """

    leads = False

    def __init__(
        self,
        plan: Plan,
        meshes: Meshes,
        *,
        naming: Naming,
        group: dist.ProcessGroup | None,
        digests: Callable[[Mapping[str, Tensor]], list[Digests]],
        device: torch.device,
    ) -> None:
        """`group` is the sender, as rank 0, and the receivers; None on ranks that do not send. `digests` says what
        each rank of an engine must hold of some whole tensors."""
        self.naming: Naming = naming
        self.version = -1
        self._group, self._digests, self._device = group, digests, device
        self._sends = meshes.training.get_local_rank() == 0
        self._receivers = range(plan.training_ranks, plan.num_ranks)
        self._orders, self._replies = Link(meshes.world, ORDERS, in_flight=2), Link(meshes.world, REPLIES)
        self._buckets: Sequence[Bucket] = ()
        self._buffers: Sequence[Tensor] = ()
        self._next_version = -1
        self._expects = False
        self._work: dist.Work | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """See `WeightSink.allocate`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        """See `WeightSink.begin_update`. Returns when the engines have sampled what they were about, and are ready."""
        is_known = self._buckets is buckets
        self._buckets, self._buffers, self._next_version, self._expects = buckets, buffers, version, False
        if not self._sends:
            return
        shared_store().add(ANNOUNCED, 1)
        self._tell(RefitOrder(version, None if is_known else tuple(buckets)))
        self._replies.receive(source=self._receivers[0])

    def load(self, number: int) -> None:
        """See `WeightSink.load`."""
        if self._group is not None:
            bucket, buffer = self._buckets[number], self._buffers[number % len(self._buffers)]
            self._work = dist.broadcast(buffer[: bucket.num_bytes], src=FIRST, group=self._group, async_op=True)

    def wait(self) -> None:
        """See `WeightSink.wait`."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def end_update(self) -> None:
        """See `WeightSink.end_update`; without digests to compare, returns when the engines have ended theirs."""
        if self._sends and not self._expects:
            self._tell(None)
            self._orders.settle()
        self.version = self._next_version

    def digests_of(self, bucket: Bucket, flat: Tensor) -> Digests:
        """See `WeightSink.digests_of`; of every rank of an engine, on the rank that sends."""
        self._expects = True
        if not self._sends:
            return {}
        whole = {entry.name: entry.view(flat) for entry in bucket.flat_entries}
        return {
            _joined(rank, name): digest
            for rank, digests in enumerate(self._digests(whole))
            for name, digest in digests.items()
        }

    def differing(self, expected: Digests) -> list[str]:
        """See `WeightSink.differing`: of all engines, on the rank that sends."""
        if not self._sends:
            return []
        self._tell(expected)
        self._orders.settle()
        return self._replies.receive(source=self._receivers[0])

    def _tell(self, what: RefitOrder | Digests | None) -> None:
        for rank in self._receivers:
            self._orders.send(what, to=rank)

    def generate(self, requests: Any) -> Any:
        """It does not."""
        raise AssertionError("this rank holds no engine")

    def abort(self) -> None:
        """Nothing runs here."""

    def sleep(self) -> None:
        """The engine's memory is on other devices."""

    def wake(self) -> None:
        """The engine's memory is on other devices."""

    def require_alive(self) -> None:
        """The engine's processes are on other ranks, which say so themselves."""

    def revive(self) -> None:
        """The engine's processes are on other ranks."""

    def close(self) -> None:
        """The ranks that hold the engines end them."""


def _joined(rank: int, name: str) -> str:
    return f"{rank}/{name}"


def expected_by(rank: int, expected: Digests) -> Digests:
    """Of the digests that were sent for all ranks of an engine, those for one of them."""
    mark = _joined(rank, "")
    return {name.removeprefix(mark): digest for name, digest in expected.items() if name.startswith(mark)}


class RemoteSampler(Sampler):
    """A sampler whose engines are elsewhere: what it is asked for has been scored already when it comes."""

    def __init__(self, run: Launch[Config]) -> None:
        plan, meshes = run.plan, run.meshes
        self._leaders = engine_leaders(plan, ranks_per_engine=run.cfg.rollout.tp_size)
        self._message, self._watch = run.report.message, run.watch
        self._engines = range(plan.training_ranks, plan.num_ranks)
        self._orders, self._speaks = Link(meshes.world, ORDERS), meshes.training.get_local_rank() == 0
        self._rollouts, self._held_out = Link(meshes.world, ROLLOUTS), Link(meshes.world, HELD_OUT)
        self._probes = Link(meshes.world, PROBES)
        # By step: that of the last one that was collected, and of the one before.
        self._states: dict[int, Mapping[str, Any] | None] = {0: None}

    def collect(self, step: int) -> Collected:
        """See `Sampler.collect`; waits until the engines have sampled the step."""
        parts: list[Delivery] = [self._rollouts.receive(source=rank) for rank in self._leaders]
        self._states = {step - 1: self._states[step - 1], step: parts[0].state}
        self._watch.request_stop(parts[0].wish)
        for message in parts[0].messages:
            self._message(message)
        outcomes = [outcome for part in parts for outcome in part.outcomes]
        return Collected(
            pending=[known_reward(*outcome) for outcome in outcomes],
            metrics=merge_all([part.metrics for part in parts]),
            places=parts[0].places,
            group_size=parts[0].group_size,
            # Of the last refit: a step that was sampled ahead says nothing about the weights as they are now.
            probes=[probe for rank in self._leaders for probe in self._probes.receive(source=rank)],
        )

    def sample_held_out(self) -> list[Pending]:
        """See `Sampler.sample_held_out`; the engines do it by themselves, right after the refit."""
        return [known_reward(*outcome) for rank in self._leaders for outcome in self._held_out.receive(source=rank)]

    def state(self, step: int) -> Mapping[str, Any] | None:
        """See `Sampler.state`: it came with the step's rollouts."""
        return self._states[step]

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """See `Sampler.restore`; the ranks that hold the engines go on from what they read themselves."""
        self._states = {step: saved}

    def dismiss(self) -> None:
        """See `Sampler.dismiss`; takes from the engines what they have sampled ahead, so that they can end."""
        for rank in self._engines if self._speaks else ():
            self._orders.send(Dismissed(), to=rank)
        for link in (self._rollouts, self._probes, self._held_out):
            for rank in self._leaders:
                while not isinstance(link.receive(source=rank), Shutdown):
                    pass
        self._orders.settle()
