"""Hand each rank's device from the trainer to the engine and back.

At every edge between them each rank waits for its device, all ranks meet, the allocator returns unused memory, and the
free memory is compared with the needs of the next phase: a phase that cannot fit is refused here, by name, instead of
failing somewhere inside.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config, OffloadConfig
from spmdrl.dist.collectives import gather_objects, host_barrier
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.start import Restarts
from spmdrl.memory.device import MemoryPlan, gib
from spmdrl.model.offload import TrainerMemory
from spmdrl.refit.refit import Refitting
from spmdrl.report.memory import Edge, MemoryReading, read_memory
from spmdrl.run import Launch
from spmdrl.types import StopRequested


class MemoryShortage(RuntimeError):
    """The next phase does not fit into the free memory of some rank's device."""


@dataclass(frozen=True, slots=True)
class _Need:
    """What must be free after an edge."""

    num_bytes: int
    purpose: str  # completes "rank 0 needs ... "
    remedy: str
    allocator_helps: bool  # whether what torch's allocator caches can serve it


class Handover:
    """Moves the device between trainer and engine; every rank of the mesh must enter each phase.

    It begins with the trainer asleep, as `TrainerMemory.sleep` leaves it, and the engine as it was started.
    """

    def __init__(
        self,
        trainer: TrainerMemory,
        engine: RolloutEngine,
        refit: Refitting,
        mesh: DeviceMesh,
        offload: OffloadConfig,
        *,
        plan: MemoryPlan | None,
        restart_engine: bool,
        message: Callable[[str], None],
        span: Callable[[str], AbstractContextManager[None]],
        read: Callable[[torch.device], MemoryReading] = read_memory,
    ) -> None:
        """`plan` is None where there is no device memory to run out of. With `restart_engine` the run survives the
        death of an engine; `message` shows a line about each. `span` measures time, as `Report.span`."""
        self.restarts = Restarts(mesh, self._revive if restart_engine else None, message=message)
        self._trainer = trainer
        self._engine = engine
        self._refit = refit
        self._mesh = mesh
        self._device = torch.device(mesh.device_type)
        self._releases_weights = "weights" in offload.engine
        self._plan = plan
        self._span = span
        self._read = read
        self._edges: list[Edge] = []
        self._version = -1
        self._engine_sleeps = False
        self._engine_has_weights = False
        self._given_back = 0  # bytes, by an engine that went to sleep
        self._rollout_randomness = RandomStates.now(self._device)
        self._pass_edge("engine started", lambda: None)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Keep the engine awake, with the weights of the last refit and random states of its own."""
        if not self._engine_has_weights:
            self.refit(version=self._engine.version)
        self._pass_edge("engine awake", partial(self.restarts.carry, self._engine.wake, during="waking the engine"))
        self._engine_sleeps = False
        trainers = RandomStates.now(self._device)
        self._rollout_randomness.restore()
        yield
        self._rollout_randomness = RandomStates.now(self._device)
        trainers.restore()
        self._sleep_engine()

    @contextmanager
    def training(self) -> Iterator[None]:
        """Keep the trainer awake and the engine asleep. The two edges are timed as the span `switch`.

        A StopRequested inside, which all ranks raise at the same place, ends it as usual."""
        with self._span("switch"):
            if not self._engine_sleeps or (self._releases_weights and self._engine_has_weights):
                self._sleep_engine()
            self._pass_edge("trainer awake", self._trainer.wake, self._to_compute)
        try:
            yield
        except StopRequested:
            self._end_training()
            raise
        self._end_training()

    def refit(self, *, version: int) -> None:
        """Load the trainer's weights into the engine, which first takes back released memory for them."""
        self._version = version
        self._load_weights()
        self.restarts.carry(self._engine.require_alive, during=f"the refit to version {version}")

    def _load_weights(self) -> None:
        self._pass_edge("refitted", lambda: self._refit(version=self._version))
        self._engine_has_weights = True

    def _revive(self) -> None:
        """Start engines that have died again, load the weights into all of them and wake them; the trainer sleeps."""
        self._pass_edge("engine revived", self._engine.revive)
        self._load_weights()
        self._engine.wake()
        self._engine_sleeps = False

    def take_edges(self) -> list[Edge]:
        """Return the edges passed since the last call, in order."""
        edges, self._edges = self._edges, []
        return edges

    def _end_training(self) -> None:
        with self._span("switch"):
            self._pass_edge("trainer asleep", self._trainer.sleep, self._to_wake_engine)

    def _sleep_engine(self) -> None:
        """Put the engine to sleep: it releases the memory that `offload.engine` names."""
        self._settle()
        self._meet()  # the rank that leads an engine releases what the others read here
        before = self._read(self._device).free_bytes
        put_to_sleep = partial(self.restarts.carry, self._engine.sleep, during="putting the engine to sleep")
        self._pass_edge("engine asleep", put_to_sleep, self._to_wake_trainer)
        if not self._engine_sleeps:  # else all of it was asleep before, and a refit had taken the weights back
            mine = self._edges[-1].readings[self._mesh.get_local_rank()]
            self._given_back = max(0, mine.free_bytes - before)
        self._engine_sleeps = True
        self._engine_has_weights &= not self._releases_weights

    def _pass_edge(
        self, name: str, change: Callable[[], None], need: Callable[[], _Need | None] = lambda: None
    ) -> None:
        """Make the change, wait for it on all ranks, measure, and check that the next phase fits.

        Raises MemoryShortage on every rank when it does not fit on one.
        """
        began = time.perf_counter()
        change()
        self._settle()
        self._meet()  # one rank talks to an engine of several: the others' memory is free only once that rank is here
        reading, needed = self._read(self._device), need()
        if self._shortage(name, reading, needed):
            gc.collect()  # slow, and rarely of use: cycles of Python objects that hold tensors
            self._settle()
            reading = self._read(self._device)
        found = gather_objects(self._mesh, (reading, self._shortage(name, reading, needed)))
        self._edges.append(Edge(name, time.perf_counter() - began, tuple(reading for reading, _ in found)))
        if shortages := [sentence for _, sentence in found if sentence]:
            raise MemoryShortage("\n".join(shortages))

    def _meet(self) -> None:
        """Wait for all ranks, where there is device memory to be measured."""
        if self._plan is not None:
            host_barrier(self._mesh)

    def _settle(self) -> None:
        """Wait for the device, and return the memory that torch's allocator caches."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _shortage(self, edge: str, reading: MemoryReading, need: _Need | None) -> str:
        """Return a sentence when this rank has less free memory than it needs, else an empty text."""
        if need is None or self._plan is None:
            return ""
        free = reading.free_bytes + (reading.reserved_bytes - reading.allocated_bytes if need.allocator_helps else 0)
        if free >= need.num_bytes:
            return ""
        return (
            f"{edge}: rank {self._mesh.get_local_rank()} needs {gib(need.num_bytes)} {need.purpose}, but {gib(free)} "
            f"of its device's {gib(reading.total_bytes)} are free; {need.remedy}"
        )

    def _to_wake_trainer(self) -> _Need | None:
        if self._plan is None:
            return None
        brought_back, has_state = self._trainer.asleep_bytes, self._trainer.has_optimizer_state
        return _Need(
            self._plan.to_train(brought_back=brought_back, has_optimizer_state=has_state),
            "to train, besides activations",
            'lower rollout.memory_fraction, add "weights" to offload.engine, or use more ranks',
            allocator_helps=True,
        )

    def _to_compute(self) -> _Need | None:
        if self._plan is None:
            return None
        return _Need(
            self._plan.training,
            "for gradients and gathered weights, besides activations",
            'add "weights" to offload.engine, or use more ranks',
            allocator_helps=True,
        )

    def _to_wake_engine(self) -> _Need | None:
        # The torch engine takes what its requests need, which may be less than it had before.
        if self._plan is None or self._plan.engine_share is None:
            return None
        return _Need(
            self._given_back,
            "for what the engine gave back before training",
            'set offload.trainer = "all", or lower rollout.memory_fraction',
            allocator_helps=False,
        )


class NoHandover:
    """Replaces the handover of a run without an engine: the trainer keeps the device."""

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Refuse: nothing can be sampled."""
        raise AssertionError("a run without an engine samples nothing")
        yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Change nothing."""
        yield

    def take_edges(self) -> list[Edge]:
        """Return no edges."""
        return []


def start_handover(run: Launch[Config], trainer: TrainerMemory, engine: RolloutEngine, refit: Refitting) -> Handover:
    """The handover of a run whose trainer sleeps and whose engine was just started."""
    return Handover(
        trainer,
        engine,
        refit,
        run.meshes.training,
        run.cfg.offload,
        plan=run.inputs.memory,
        restart_engine=run.cfg.rollout.restart_engine,
        message=run.report.message,
        span=run.report.span,
    )


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of torch's random number generators, on the host and on this rank's device."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomStates:
        """Capture this process's random states."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else None)

    def restore(self) -> None:
        """Set the generators back to these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
