"""The engines of other ranks, as a refit on a rank that trains sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.config.plan import Plan
from spmdrl.dist.collectives import Link
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import shared_store
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.refit.bucket import AdapterVersion, Bucket, Naming
from spmdrl.refit.digest import digest
from spmdrl.types import Request, Response

# Channels between ranks that train and ranks that hold engines, disaggregated, and the orders of a refit.
#
# orders    first rank that trains -> every rank that holds an engine: a refit begins, and the digests it must produce;
#           or adapters, which come with their order
# buckets   the same way, by broadcast
# replies   first rank that holds an engine -> first rank that trains
# rollouts  every rank that leads an engine -> every rank that trains: its part of a step, of an evaluation, and
#           its answers to the probe, after a refit


ORDERS, REPLIES, ROLLOUTS, PROBES, HELD_OUT = range(1, 6)
FIRST = 0  # the rank that sends weights and receives replies; the first of all, so it trains
ANNOUNCED = "refits_announced"  # a counter in the shared store, of refits and of the end of the run


@dataclass(frozen=True, slots=True)
class RefitOrder:
    """Announces the weights of `version`, in these buckets; None: in those of the last order."""

    version: int
    buckets: tuple[Bucket, ...] | None


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Brings the adapters of a version, in host memory. Nobody waits for those who receive them."""

    adapters: AdapterVersion
    digest: str  # of their memory as it was sent


class EndOfRun(Exception):
    """The run ends or stops; sent instead of an order, and raised where it is received."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The last value on its channel from a rank that leads an engine and was dismissed."""


Digests = dict[str, str]  # by the engine's name of a weight


class RemoteEngine(RolloutEngine):
    """Sends weights to the engines of other ranks; the first rank that trains sends for all.

    It samples nothing: `RemoteSampler` receives the rollouts.
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
        """`group` holds the sender, as rank 0, and the receivers; None on ranks that do not send. `digests` computes
        what each rank of an engine must hold after loading some whole tensors."""
        super().__init__(device)
        self.naming = naming
        self._group, self._digests = group, digests
        self._sends = meshes.training.get_local_rank() == 0
        self._receivers = range(plan.training_ranks, plan.num_ranks)
        self._orders, self._replies = Link(meshes.world, ORDERS, in_flight=2), Link(meshes.world, REPLIES)
        self._expects = False
        self._work: dist.Work | None = None

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        """Return when the engines have finished, or paused, what they were sampling and are ready."""
        is_known = self._buckets is buckets
        super().begin_update(buckets, buffers, version=version)
        self._expects = False
        if not self._sends:
            return
        shared_store().add(ANNOUNCED, 1)
        self._send_all(RefitOrder(version, None if is_known else tuple(buckets)))
        self._replies.receive(source=self._receivers[0])

    def load(self, number: int) -> None:
        if self._group is not None:
            bucket, buffer = self._buckets[number], self._buffers[number % len(self._buffers)]
            self._work = dist.broadcast(buffer[: bucket.num_bytes], src=FIRST, group=self._group, async_op=True)

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def end_update(self) -> None:
        """Without digests to compare, return when the engines have ended their update."""
        if self._sends and not self._expects:
            self._send_all(None)
            self._orders.settle()
        super().end_update()

    def digests_of(self, bucket: Bucket, flat: Tensor) -> Digests:
        """Compute the digests of every rank of an engine, on the rank that sends."""
        self._expects = True
        if not self._sends:
            return {}
        whole = {entry.name: entry.view(flat) for entry in bucket.flat_entries}
        return {
            _joined(rank, name): found
            for rank, by_name in enumerate(self._digests(whole))
            for name, found in by_name.items()
        }

    def differing(self, expected: Digests) -> list[str]:
        """List the weights of all engines that differ, on the rank that sends."""
        if not self._sends:
            return []
        self._send_all(expected)
        self._orders.settle()
        return self._replies.receive(source=self._receivers[0])

    def load_adapters(self, adapters: AdapterVersion) -> list[str]:
        """Send adapters to the engines, which take them between two steps and compare digests then."""
        if self._sends:
            on_host = dataclasses.replace(adapters, flat=adapters.flat.cpu())
            shared_store().add(ANNOUNCED, 1)
            self._send_all(AdapterOrder(on_host, digest(on_host.flat)))
        self.version = adapters.version
        return []

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        raise AssertionError("this rank holds no engine")

    def _send_all(self, order: RefitOrder | AdapterOrder | Digests | None) -> None:
        for rank in self._receivers:
            self._orders.send(order, to=rank)


def expected_by(rank: int, expected: Digests) -> Digests:
    """Select the digests for one rank of an engine from those that were sent for all of its ranks."""
    mark = _joined(rank, "")
    return {name.removeprefix(mark): digest for name, digest in expected.items() if name.startswith(mark)}


def _joined(rank: int, name: str) -> str:
    return f"{rank}/{name}"


class NoEngine(RolloutEngine):
    """Replaces the engine of a run that reads its rollouts: every refit succeeds and changes nothing."""

    leads = False

    def load(self, number: int) -> None:
        return

    def load_adapters(self, adapters: AdapterVersion) -> list[str]:
        self.version = adapters.version
        return []

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        raise AssertionError("rollouts are read from files, and there is no engine")
