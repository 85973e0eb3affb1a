"""Ranks that do not go through the same steps: their groups, what they send each other, and refits by broadcast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmdrl.config import RefitConfig
from spmdrl.dist.collectives import Link, gather_objects
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.remote import RemoteEngine
from spmdrl.engine.torch.engine import DisaggregatedTorchEngine
from spmdrl.model.load import load_model_config, load_policy
from spmdrl.refit.digest import digest
from spmdrl.refit.refit import Refit, RefitMismatch
from spmdrl.rollout.serve import _RefitReceiver
from spmdrl.types import UserError
from tests.helpers.configs import model_config, plan_for
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks


def _groups() -> dict[str, Any]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world, ranks_per_engine=2, engine_ranks=4)
        found: dict[str, Any] = {"trains": meshes.trains, "samples": meshes.samples}
        if meshes.samples:
            found["engine"] = (meshes.engine_index, meshes.num_engines, meshes.engine.get_local_rank())
            found["with"] = gather_objects(meshes.engine, world.rank)
        else:
            found["with"] = gather_objects(meshes.training, world.rank)
        return found


def test_the_last_ranks_hold_the_engines() -> None:
    one, other, *engines = run_ranks(6, _groups)
    assert one == other == {"trains": True, "samples": False, "with": [0, 1]}
    assert [found["engine"] for found in engines] == [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]
    assert [found["with"] for found in engines] == [[2, 3], [2, 3], [4, 5], [4, 5]]


def _letters() -> list[Any]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        mesh = build_meshes(world).world
        slow, fast = Link(mesh, 1, in_flight=3), Link(mesh, 2)
        heard: list[Any] = []
        if world.rank == 0:
            for value in (1, "two" * 100_000, None):
                slow.send(value, to=1)
            fast.send("first", to=1)  # no one has received the others yet
            slow.settle()
            slow.send(UserError("it does not fit"), to=1)
            slow.settle()
        else:
            heard = [fast.receive(source=0), *(slow.receive(source=0) for _ in range(3))]
            with pytest.raises(UserError, match="it does not fit"):
                slow.receive(source=0)
        return heard


def test_values_arrive_in_order_and_channels_do_not_wait_for_each_other() -> None:
    assert run_ranks(2, _letters)[1] == ["first", 1, "two" * 100_000, None]


def corrupt(refit: Refit, engine: RemoteEngine) -> None:
    """From now on, flip one bit of the second bucket after its digests were taken."""
    load, buffers = engine.load, refit._buffers

    def flip(number: int) -> None:
        if number == 1:
            buffers[1][40] ^= 1
        load(number)

    engine.load = flip  # type: ignore[method-assign]


def _refitted(path: str, corrupts: bool) -> Any:
    """Two refits from two ranks that train to one engine: digests of all weights after each, or what was said."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world, engine_ranks=1)
        assert (meshes.weights is None) == (world.rank == 1)
        settings = model_config(path)
        plan = plan_for(4, 3, engine_ranks=1)
        if not meshes.trains:
            assert meshes.weights is not None
            engine = DisaggregatedTorchEngine(
                load_model_config(settings),
                meshes.weights,
                device=world.device,
                dtype=torch.float32,
                kernel="sdpa",
                max_running=4,
            )
            weights = _RefitReceiver(engine, meshes)
            found = []
            for version in (1, 2):
                weights.receive()
                assert engine.version == version
                found.append({name: digest(tensor) for name, tensor in engine.weights.items()})
            weights.settle()
            return found
        policy = load_policy(settings, meshes.model, temperature=1.0)
        remote = RemoteEngine(
            plan,
            meshes,
            naming="model",
            group=None if meshes.weights is None else meshes.weights.get_group(),
            digests=lambda whole: [{name: digest(tensor) for name, tensor in whole.items()}],
            device=world.device,
        )
        refit = Refit(policy, remote, meshes, RefitConfig(bucket_bytes=2**14), dtype=torch.float32)
        sent: list[Any] = []
        for version in (1, 2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.to_local().mul_(1.01).add_(0.001 * version)
            if corrupts and version == 2 and world.is_main:
                corrupt(refit, remote)
            try:
                refit(version=version)
            except RefitMismatch as error:
                sent.append(str(error))
                continue
            sent.append({name: digest(p.full_tensor().detach()) for name, p in policy.model.named_parameters()})
        del policy, refit
        dist.barrier(group=meshes.training.get_group())
        return sent


def test_a_broadcast_refit_brings_every_bit(tmp_path: Path) -> None:
    one, other, engine = run_ranks(3, _refitted, save_qwen3(tmp_path), False)
    assert one == other == engine
    assert one[0] != one[1]


def test_one_flipped_bit_is_noticed_by_every_rank_that_trains(tmp_path: Path) -> None:
    one, other, _ = run_ranks(3, _refitted, save_qwen3(tmp_path), True)
    assert one[1] == other[1]
    assert "after the refit to version 2 the engine does not hold the trainer's weights" in one[1]
