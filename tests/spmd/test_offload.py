"""A trainer that sleeps between its updates learns exactly what one that never does learns."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from spmdrl import checkpoint
from spmdrl.config import RefitConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.learn.learner import Learner
from spmdrl.model.offload import Moves, TrainerMemory
from spmdrl.refit.gather import Gatherer
from spmdrl.refit.refit import Refit
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.learners import full_state, start_learner, update_once
from tests.helpers.models import save_llama, save_qwen3
from tests.helpers.ranks import run_ranks


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))  # tied; 97 rows are padded on the last of two ranks


def _memory(learner: Learner, moves: Moves) -> TrainerMemory:
    return TrainerMemory([learner], torch.device("cpu"), moves=moves)


def _trained(path: str, folder: str, launches: list[tuple[Moves, int, int]]) -> dict[str, Tensor]:
    """The state after several launches: each goes on from the checkpoint before update `first`, to update `last`."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        for moves, first, last in launches:
            learner = start_learner(path, meshes)
            checkpoint.restore(Path(folder), {"policy": learner}, meshes.training, step=first - 1)
            memory = _memory(learner, moves)
            memory.sleep()  # before FSDP has seen its first forward
            for step in range(first, last + 1):
                memory.wake()
                update_once(learner, meshes, step=step)
                memory.sleep()
            memory.wake()
            save_and_wait(folder, {"policy": learner}, meshes, step=last)
        state = full_state(learner)
        del learner, memory
        return state


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_with_sleep_is_bitwise_training_without(qwen3: str, tmp_path: Path, num_ranks: int) -> None:
    whole = run_ranks(num_ranks, _trained, qwen3, str(tmp_path / "whole"), [("none", 1, 3)])[0]
    assert any(whole[name].any() for name in whole if "exp_avg" in name)
    for moves in ("optimizer", "all"):
        launches = [(moves, 1, 2), (moves, 3, 3)]
        resumed = run_ranks(num_ranks, _trained, qwen3, str(tmp_path / moves), launches)[0]
        assert whole.keys() == resumed.keys()
        for name in whole:
            assert torch.equal(whole[name], resumed[name]), (moves, name)


class _NoDTensorOps(TorchDispatchMode):
    """Refuses every operation on a DTensor. On CUDA a sleeping one says it is on the device while its shard is on the
    host, and operations such as detach, which a state dict is made with, fail."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(isinstance(x, DTensor) for x in tree_leaves((args, kwargs))), f"{func} on a DTensor"
        return func(*args, **(kwargs or {}))


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    return state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # torch 2.11


def _slept(path: str, moves: Moves) -> dict[str, Any]:
    """What is where before, during and after a sleep."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        learner = start_learner(path, meshes)
        memory = _memory(learner, moves)
        update_once(learner, meshes, step=1)
        for parameter in learner.model.parameters():  # as after a backward whose gradients were kept
            parameter.grad = parameter.detach() * 2
        parameters = list(learner.model.parameters())
        before = full_state(learner)
        locals_before = [parameter.to_local().detach().clone() for parameter in parameters]
        with torch.no_grad():
            storages = [parameter.to_local().untyped_storage() for parameter in parameters]
        engine = TorchEngine(
            AutoConfig.from_pretrained(path), device=world.device, dtype=torch.float32, kernel="sdpa", max_running=4
        )
        refit = Refit(
            learner.model, engine, meshes, RefitConfig(bucket_bytes=2**14, verify="every"), dtype=torch.float32
        )
        found: dict[str, Any] = {"host": []}
        for _ in range(3):
            memory.sleep()
            memory.sleep()  # nothing is left to do
            found["asleep_bytes"] = memory.asleep_bytes
            found["weights_left"] = sum(storage.nbytes() for storage in storages)
            found["host"].append(memory._host.num_bytes)
            found["readable"] = all(
                torch.equal(p.to_local(), x) for p, x in zip(parameters, locals_before, strict=True)
            )
            with _NoDTensorOps():
                refit(version=1)
                gatherer = Gatherer(
                    learner.model, meshes.model.copy, dtype=torch.bfloat16, bucket_bytes=2**14, naming="checkpoint"
                )
                assert sum(len(tensors) for tensors in gatherer.whole_tensors()) == len(parameters)
            found["refitted"] = all(
                torch.equal(engine.weights[name.removeprefix("model.")], before[name])
                for name, _ in learner.model.named_parameters()
            )
            refused = 0
            for use in (learner.optimizer.step, partial(learner.model, None)):
                try:
                    use()
                except AssertionError as error:
                    refused += "the trainer sleeps" in str(error)
            found["refused"] = refused
            memory.wake()
        found["same_objects"] = all(a is b for a, b in zip(parameters, learner.model.parameters(), strict=True))
        found["fsdp_sees_it"] = all(
            one._sharded_param_data.untyped_storage().data_ptr()
            == one.sharded_param._local_tensor.untyped_storage().data_ptr()
            for module in learner.model.modules()
            if isinstance(module, FSDPModule)
            for group in _param_groups(module)
            for one in group.fsdp_params
        )
        found["gradients"] = all(torch.equal(p.grad.to_local(), p.to_local() * 2) for p in parameters)
        after = full_state(learner)
        found["same_values"] = all(torch.equal(before[name], after[name]) for name in before)
        found["weight_bytes"] = sum(storage.nbytes() for storage in storages)
        del learner, memory, refit, gatherer, parameters, storages
        return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("save", [save_qwen3, save_llama])
def test_a_sleeping_trainer_holds_nothing_and_is_still_readable(tmp_path: Path, num_ranks: int, save) -> None:
    for found in run_ranks(num_ranks, _slept, save(tmp_path), "all"):
        assert found["weights_left"] == 0
        # With gradients and two moments, which are not padded where the weights are.
        assert found["asleep_bytes"] > 3.9 * found["weight_bytes"]
        assert len(set(found["host"])) == 1, "host buffers are allocated once"
        assert found["host"][0] < 2 * found["asleep_bytes"] + 2**16
        assert found["readable"] and found["refitted"] and found["same_objects"] and found["fsdp_sees_it"]
        assert found["same_values"] and found["gradients"]
        assert found["refused"] == 2


def test_only_the_optimizers_state_moves_when_only_that_is_asked_for(qwen3: str) -> None:
    (found,) = run_ranks(1, _slept, qwen3, "optimizer")
    assert found["weights_left"] == found["weight_bytes"]
    assert 2 * found["weight_bytes"] <= found["asleep_bytes"] < 2.1 * found["weight_bytes"]
    assert found["readable"] and found["refitted"] and found["same_values"]
