"""What saves memory changes no number: gradients and weights are those without it, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl import checkpoint
from spmdrl.config import OptimConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.model.offload import StateOnHost, TrainerMemory
from spmdrl.model.sharding import decoder_layers
from spmdrl.step.batch import build_batch
from tests.helpers.batches import completed
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.configs import loss_config, model_config, plan_for
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

COUNT = 8
ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}
LEVERS: dict[str, dict[str, Any]] = {
    "full": {"gradient_checkpointing": "full"},
    "selective": {"gradient_checkpointing": "selective"},
    "layers stay gathered": {"reshard_after_forward": False},
    "two layers ahead": {"prefetch_layers": 2},
    "selective, gathered, ahead": {
        "gradient_checkpointing": "selective",
        "reshard_after_forward": False,
        "prefetch_layers": 9,
    },
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=4)


def _start(path: str, meshes: Meshes, optim: dict[str, Any], **model: Any) -> Learner:
    policy = load_policy(model_config(path, **model), meshes.model, temperature=0.8)
    return Learner(policy, OptimConfig(**optim), PolicyObjective(loss_config()), num_updates=4, dtype=torch.float32)


def _update(learner: Learner, world: World, meshes: Meshes, *, step: int) -> None:
    share = COUNT // world.num_ranks
    # Long enough for the linear layers of a CPU to take tiles.
    mine = random_sequences(COUNT, seed=step, max_tokens=80)[world.rank * share : (world.rank + 1) * share]
    plan = plan_for(COUNT, world.num_ranks, max_sequence_tokens=80, max_tokens_per_micro_batch=160)
    batch = build_batch(mine, plan, meshes, aggregation="token_mean")
    update(learner, completed(batch, meshes).mini_batches, meshes, step=step)


def _state(learner: Learner) -> dict[str, Tensor]:
    """Every weight and every tensor of the optimizer, this rank's parts."""
    state = {}
    for name, parameter in learner.model.named_parameters():
        state[name] = parameter.to_local().detach().clone()
        for key, value in learner.optimizer.state[parameter].items():
            state[f"{name}.{key}"] = (value.to_local() if hasattr(value, "to_local") else value).clone()
    return state


def _updated(path: str) -> dict[str, dict[str, Tensor]]:
    """After two updates with and without each lever. SGD with rate 1: what a weight moves by is its gradient."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        results = {}
        for name, model in {"none": {}, **LEVERS}.items():
            learner = _start(path, meshes, {"name": "sgd", "lr": 1.0, "max_grad_norm": 1e6}, **model)
            results.setdefault("start", _state(learner))
            for step in (1, 2):
                _update(learner, world, meshes, step=step)
            results[name] = _state(learner)
            del learner
        return results


def test_levers_of_the_model_do_not_change_a_gradient(qwen3: str) -> None:
    for results in run_ranks(2, _updated, qwen3):
        assert max((results["none"][name] - before).norm() for name, before in results["start"].items()) > 1e-3
        for lever in LEVERS:
            for name, weight in results["none"].items():
                assert torch.equal(weight, results[lever][name]), (lever, name)


def _gathered(path: str) -> list[tuple[int, list[int], list[int]]]:
    """For each lever: layers still gathered after a forward pass, and how many each layer gathers ahead of itself."""
    as_if_large = patch("spmdrl.model.sharding._ONE_UNIT_BYTES", 0)
    with as_if_large, spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        found = []
        for model in ({}, {"reshard_after_forward": False}, {"prefetch_layers": 2}):
            learner = _start(path, meshes, ADAMW, **model)
            batch = build_batch(random_sequences(2), plan_for(2, 1), meshes, aggregation="token_mean")
            learner.model(batch.mini_batches[0][0])
            layers = decoder_layers(learner.model.model)
            whole = sum(not any(isinstance(p, DTensor) for p in layer.parameters()) for layer in layers)
            states = [layer._get_fsdp_state() for layer in layers]
            found.append(
                (
                    whole,
                    [len(state._states_to_forward_prefetch) for state in states],
                    [len(state._states_to_backward_prefetch) for state in states],
                )
            )
            del learner, layers, states
        return found


def test_levers_of_fsdp_reach_it(qwen3: str) -> None:
    (found,) = run_ranks(1, _gathered, qwen3)
    nothing = [0, 0, 0, 0]
    assert found == [(0, nothing, nothing), (4, nothing, nothing), (0, [2, 2, 1, 0], [0, 1, 2, 2])]


def _with_state_on_host(path: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """After four updates: with all state on the device, and by blocks, with sleeps in between, and checkpoints that are
    handed from one to the other and back."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        usual = _start(path, meshes, ADAMW)
        for step in range(1, 5):
            _update(usual, world, meshes, step=step)
        whole = _state(usual)
        del usual
        for first, last, on_host in ((1, 1, True), (2, 2, False), (3, 4, True)):
            learner = _start(path, meshes, ADAMW | {"state_on_host": on_host})
            assert isinstance(learner.optimizer, StateOnHost) == on_host
            learner.optimizer.block_bytes = 2**13
            checkpoint.restore(Path(folder), {"policy": learner}, meshes.training, step=first - 1)
            memory = TrainerMemory([learner], torch.device("cpu"), moves="all")
            for step in range(first, last + 1):
                memory.wake()
                _update(learner, world, meshes, step=step)
                memory.sleep()
                moved = memory.asleep_bytes
            memory.wake()
            save_and_wait(folder, {"policy": learner}, meshes, step=last)
        # Storages, which are padded where the rows do not come out even.
        weights = sum(p.to_local().untyped_storage().nbytes() for p in learner.model.parameters())
        blocks = _state(learner)
        del learner, memory
        return whole, blocks, moved == weights


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_state_on_the_host_is_bitwise_state_on_the_device(qwen3: str, tmp_path: Path, num_ranks: int) -> None:
    for whole, blocks, only_weights_slept in run_ranks(num_ranks, _with_state_on_host, qwen3, str(tmp_path)):
        assert any(whole[name].any() for name in whole if "exp_avg" in name)
        assert whole.keys() == blocks.keys()
        for name in whole:
            assert torch.equal(whole[name], blocks[name]), name
        assert only_weights_slept
