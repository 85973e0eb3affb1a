"""The device passes from trainer to engine and back in one order, with random numbers kept apart and memory checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from spmdrl.config import OffloadConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.protocol import EngineDied
from spmdrl.memory.device import GIB, MemoryPlan
from spmdrl.report.memory import MemoryReading, read_memory
from spmdrl.step.handover import Handover, MemoryShortage
from spmdrl.types import StopRequested
from tests.helpers.ranks import run_ranks

PLAN = MemoryPlan(
    weights=4 * GIB,
    gradients=4 * GIB,
    optimizer=8 * GIB,
    gathered=GIB,
    buckets=GIB,
    cast=0,
    moved=12 * GIB,
    engine_weights=8 * GIB,
    free_at_launch=75 * GIB,
    engine_share=50 * GIB,
    engine_keeps=0,
)
CACHED = 2 * GIB  # what torch's allocator keeps, which serves the trainer and no engine


class Device:
    """The free GiB of one rank's device, as trainer and engine take and give them back."""

    def __init__(self) -> None:
        self.free = 30.0
        self.calls: list[str] = []
        self.told: list[str] = []

    def change(self, call: str, by: float = 0.0) -> None:
        self.calls.append(call)
        self.free += by

    def read(self, _: torch.device) -> MemoryReading:
        free_bytes = int(self.free * GIB)
        return MemoryReading(
            total_bytes=80 * GIB, free_bytes=free_bytes, reserved_bytes=CACHED + GIB, allocated_bytes=GIB, host_bytes=0
        )


class Trainer:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.asleep_bytes = 12 * GIB
        self.has_optimizer_state = True

    def sleep(self) -> None:
        self._device.change("trainer.sleep", +12)
        self.asleep_bytes = 12 * GIB

    def wake(self) -> None:
        self._device.change("trainer.wake", -12)
        self.asleep_bytes = 0


class Engine:
    version = 0

    def __init__(self, device: Device, gives_back: float) -> None:
        self._device = device
        self._gives_back = gives_back
        self._asleep = False
        self.dies_in = ""  # the call that finds it dead
        self._dead = False

    def sleep(self) -> None:
        self._ask("sleep")
        self._device.change("engine.sleep", 0 if self._asleep else self._gives_back)
        self._asleep = True

    def wake(self) -> None:
        self._ask("wake")
        self._device.change("engine.wake", -self._gives_back if self._asleep else 0)
        self._asleep = False

    def require_alive(self) -> None:
        self._ask("refit")

    def revive(self) -> None:
        if self._dead:
            self._device.change("engine.revive", -self._gives_back if self._asleep else 0)
            self._dead = self._asleep = False

    def _ask(self, call: str) -> None:
        if call == self.dies_in:
            self.dies_in, self._dead = "", True
            self._device.free += 0 if self._asleep else self._gives_back
            self._asleep = True
        if self._dead:
            raise EngineDied(f"{call} found it dead")


def _phases(meshes: Any, device: Device, release: Sequence[str] = ("kv_cache",), **changes: Any) -> Handover:
    def refit(*, version: int) -> None:
        device.change(f"refit {version}")

    offload = OffloadConfig(trainer="all", engine=tuple(release))
    engine: Any = Engine(device, 40.0)
    parts: Any = (Trainer(device), engine, refit)
    settings: dict[str, Any] = {
        "plan": PLAN,
        "restart_engine": False,
        "message": device.told.append,
        "span": lambda name: nullcontext(),
        "read": device.read,
    }
    settings |= changes
    return Handover(*parts, meshes.training, offload, **settings)


def _steps(release: Sequence[str]) -> tuple[list[str], list[str]]:
    """Two steps with an evaluation and a save after the first: (calls, edges)."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        device = Device()
        phases = _phases(build_meshes(world), device, release)
        phases.refit(version=0)
        for step in (1, 2):
            with phases.rollout():
                device.change("rollout")
            with phases.training():
                device.change("update")
            phases.refit(version=step)
            if step == 1:
                with phases.rollout():
                    device.change("eval")
                with phases.training():
                    device.change("save")
        return device.calls, [edge.name for edge in phases.take_edges()]


def test_each_phase_finds_the_device_as_it_needs_it() -> None:
    ((calls, edges),) = run_ranks(1, _steps, ["kv_cache"])
    sampled = ["engine.wake", "{}", "engine.sleep"]
    trained = ["trainer.wake", "{}", "trainer.sleep"]
    expected = ["refit 0", *sampled, *trained, "refit 1", *sampled, *trained, *sampled, *trained, "refit 2"]
    what = iter(["rollout", "update", "eval", "save", "rollout", "update"])
    assert calls == [call if call != "{}" else next(what) for call in expected]
    assert edges[:6] == [
        "engine started",
        "refitted",
        "engine awake",
        "engine asleep",
        "trainer awake",
        "trainer asleep",
    ]


def test_an_engine_that_released_its_weights_is_refitted_before_it_samples() -> None:
    ((calls, _),) = run_ranks(1, _steps, ["kv_cache", "weights"])
    # The evaluation after step 1 releases the weights of refit 1; the next rollout brings them back.
    at = calls.index("save")
    assert calls[at : at + 5] == ["save", "trainer.sleep", "refit 0", "engine.wake", "rollout"]  # 0: the fake's version


def _told_to_stop() -> list[str]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        device = Device()
        phases = _phases(build_meshes(world), device)
        phases.refit(version=0)
        with phases.rollout():
            device.calls.clear()
        with pytest.raises(StopRequested), phases.training():
            raise StopRequested
        with phases.training():
            device.change("save")
        return device.calls


def test_training_that_a_stop_cuts_short_ends_in_order() -> None:
    trained = ["trainer.wake", "trainer.sleep"]
    assert run_ranks(1, _told_to_stop) == [["engine.sleep", *trained, "trainer.wake", "save", "trainer.sleep"]]


def _saving_without_evaluation() -> list[str]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        device = Device()
        phases = _phases(build_meshes(world), device, ["kv_cache", "weights"])
        phases.refit(version=0)
        with phases.rollout():
            pass
        with phases.training():
            pass
        phases.refit(version=1)
        device.calls.clear()
        with phases.training():
            pass
        return device.calls


def test_weights_that_a_refit_brought_back_make_room_for_a_save() -> None:
    assert run_ranks(1, _saving_without_evaluation) == [["engine.sleep", "trainer.wake", "trainer.sleep"]]


def _random(_: str) -> tuple[list[float], list[float]]:
    """What the trainer and what the sampler draw, in turn; the sampler draws another number of them each time."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        torch.manual_seed(5)
        phases = _phases(build_meshes(world), Device())
        phases.refit(version=0)
        trainers, samplers = [], []
        for count in (1, 7, 2):
            with phases.rollout():
                samplers += torch.rand(count).tolist()
            with phases.training():
                trainers += torch.rand(2).tolist()
        return trainers, samplers


def test_sampling_does_not_move_the_trainers_random_numbers() -> None:
    ((trainers, samplers),) = run_ranks(1, _random, "")
    torch.manual_seed(5)
    assert trainers == torch.rand(6).tolist()
    torch.manual_seed(5)
    assert samplers == [x for count in (1, 7, 2) for x in torch.rand(count).tolist()]


def _leaking(where: str, gib: float) -> str:
    """Something on rank 1 keeps memory at one place of the step; what this rank is told."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        device = Device()
        phases = _phases(build_meshes(world), device)

        def leak(place: str) -> None:
            if world.rank == 1 and place == where:
                device.free -= gib

        try:
            phases.refit(version=0)
            with phases.rollout():
                leak("rollout")
            with phases.training():
                leak("training")
            with phases.rollout():
                pass
        except MemoryShortage as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("where", "gib", "expected"),
    [
        ("nowhere", 0.0, ""),
        ("rollout", 56.0, "engine asleep: rank 1 needs 17.0 GiB to train, besides activations, but 16.0 GiB of its "),
        (
            "training",
            31.0,
            "trainer asleep: rank 1 needs 40.0 GiB for what the engine gave back before training, but 39.0 ",
        ),
    ],
)
def test_a_shortage_is_told_on_every_rank(where: str, gib: float, expected: str) -> None:
    first, second = run_ranks(2, _leaking, where, gib)
    assert first == second
    assert first.startswith(expected) and bool(first) == bool(expected)
    if expected:
        assert "of its device's 80.0 GiB are free; " in first and "rollout.memory_fraction" in first


def _dying(call: str, restart: bool) -> tuple[list[str], list[str], int]:
    """The engine of rank 1 is found dead in one call of the second round: (calls of that round, lines, restarts)."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        device = Device()
        phases = _phases(build_meshes(world), device, restart_engine=restart)
        phases.refit(version=0)
        for step in (1, 2):
            if step == 2:
                device.calls.clear()
                phases._engine.dies_in = call if world.rank == 1 else ""  # type: ignore[attr-defined]
            with phases.rollout():
                device.change("rollout")
            with phases.training():
                device.change("update")
            phases.refit(version=step)
        return device.calls, device.told, phases.restarts.take_count()


@pytest.mark.parametrize("call", ["wake", "sleep", "refit"])
def test_an_engine_that_dies_at_an_edge_is_started_again(call: str) -> None:
    first, second = run_ranks(2, _dying, call, True)
    for rank, (calls, told, count) in enumerate((first, second)):
        assert [x for x in calls if x in ("rollout", "update")] == ["rollout", "update"]
        assert calls.count("engine.revive") == rank, "only the dead one"
        assert (len(told), count) == (1, 1) and f"{call} found it dead; it is started again" in told[0]
        revived = {"wake": "refit 1", "sleep": "refit 1", "refit": "refit 2"}[call]  # the weights of the moment
        assert calls.count(revived) == {"wake": 1, "sleep": 1, "refit": 2}[call]
    assert second[0][-1] == {"wake": "refit 2", "sleep": "refit 2", "refit": "engine.wake"}[call]


def test_without_restarts_the_death_of_an_engine_ends_the_run() -> None:
    with pytest.raises(Exception, match="sleep found it dead"):
        run_ranks(2, _dying, "sleep", False)


def test_without_a_device_memory_is_measured_but_never_short() -> None:
    (names,) = run_ranks(1, _measured)
    assert names[0] == ("engine started", 1, True)


def _measured() -> list[tuple[str, int, bool]]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        phases = _phases(build_meshes(world), Device(), plan=None, read=read_memory)
        with phases.training():
            pass
        edges = phases.take_edges()
        assert phases.take_edges() == []
        return [(edge.name, len(edge.readings), edge.readings[0].host_bytes > 2**20) for edge in edges]
