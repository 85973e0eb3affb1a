"""On a device: what sleeps is gone, what wakes is as it was, and a phase that does not fit is refused."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from spmdrl.config import OffloadConfig, OptimConfig, RefitConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.memory.device import GIB, MemoryPlan
from spmdrl.model.load import load_policy
from spmdrl.model.offload import Moves, TrainerMemory
from spmdrl.refit.refit import Refit
from spmdrl.report.memory import read_memory
from spmdrl.step.batch import build_batch
from spmdrl.step.handover import Handover, MemoryShortage
from spmdrl.types import Request
from tests.helpers.batches import completed
from tests.helpers.configs import loss_config, model_config, plan_for
from tests.helpers.device_memory import MIB, allocated, shards, state
from tests.helpers.device_sizes import sized
from tests.helpers.models import save_qwen3
from tests.helpers.sequences import random_sequences

SLEEP = pytest.mark.claim("Memory", "A sleeping trainer gives its memory back, and wakes bit for bit as it was.")
HANDOVER = pytest.mark.claim("Memory", "Memory is checked when the device changes hands; random states are kept apart.")

CUDA = torch.device("cuda")
BUCKET_BYTES = SPARE = sized(16 * MIB, emulated=MIB)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 24 million parameters: 90 MiB of float32, well above the granularity of the allocator.

    On an emulated device 1.7 million, 7 MiB, and limits that are as much smaller.
    """
    sizes = sized(
        {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 128},
        emulated={"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 32},
    )
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), **sizes)


def start(path: str, meshes: Meshes) -> Learner:
    policy = load_policy(model_config(path), meshes.model, temperature=1.0)
    return Learner(policy, OptimConfig(lr=1e-3), PolicyObjective(loss_config()), num_updates=4, dtype=torch.bfloat16)


def train(learner: Learner, meshes: Meshes, *, step: int) -> None:
    batch = build_batch(random_sequences(8, seed=step), plan_for(8, 1), meshes, aggregation="token_mean")
    update(learner, completed(batch, meshes).mini_batches, meshes, step=step)


def no_span(_: str) -> AbstractContextManager[None]:
    return nullcontext()


@SLEEP
@pytest.mark.parametrize("moves", ["optimizer", "all"])
def test_a_sleeping_trainer_gives_its_memory_back(qwen3: str, moves: Moves) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes, empty = build_meshes(world), allocated()
        torch.cuda.reset_peak_memory_stats()
        learner = start(qwen3, meshes)
        sizes = [shard.nbytes for shard in shards(learner.model)]
        weights = sum(sizes)
        assert torch.cuda.max_memory_allocated() - empty < weights + max(sizes) // 2  # none was there twice
        memory = TrainerMemory([learner], CUDA, moves=moves)
        train(learner, meshes, step=1)
        before, awake = state(learner), allocated()
        pinned, free = set(), []
        for _ in range(4):
            memory.sleep()
            assert memory.asleep_bytes >= (3 if moves == "all" else 2) * weights
            assert allocated() <= awake - memory.asleep_bytes + MIB
            assert allocated() - empty < (0 if moves == "all" else weights) + SPARE
            free.append(torch.cuda.mem_get_info()[0])
            pinned.add(memory._host.num_bytes)
            with torch.no_grad():
                assert all(shard.is_pinned() for shard in shards(learner.model)) == (moves == "all")
            memory.wake()
            assert abs(allocated() - awake) < MIB
            after = state(learner)
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert len(pinned) == 1
        assert min(free) >= free[0] - 2 * SPARE
        train(learner, meshes, step=2)  # the woken weights are the ones that FSDP gathers and the optimizer moves
        assert not all(torch.equal(one, other) for one, other in zip(before, state(learner), strict=True))
        del learner, memory


@SLEEP
def test_training_with_sleep_is_bitwise_training_without(qwen3: str) -> None:
    results = []
    for moves in ("none", "all"):
        with spmd_session(threads_per_rank=1, deterministic=True) as world:
            meshes = build_meshes(world)
            learner = start(qwen3, meshes)
            memory = TrainerMemory([learner], CUDA, moves=moves)
            for step in (1, 2):
                memory.sleep()
                memory.wake()
                train(learner, meshes, step=step)
            results.append(state(learner))
            del learner, memory
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def engine_for(path: str, world: Any) -> TorchEngine:
    return TorchEngine(
        AutoConfig.from_pretrained(path),
        device=world.device,
        dtype=torch.bfloat16,
        kernel="varlen",
        max_running=16,
        release=("kv_cache", "weights"),
    )


@pytest.mark.claim(
    "Weights reach the engine",
    "The embedded torch engine holds the trainer's weights after a refit in buckets, and agrees with it.",
)
def test_a_refit_from_the_host_gives_the_engine_the_trainers_weights(qwen3: str) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        learner = start(qwen3, meshes)
        memory = TrainerMemory([learner], CUDA, moves="all")
        engine = engine_for(qwen3, world)
        held, weights = allocated(), sum(weight.nbytes for weight in engine.weights.values())
        engine.sleep()
        assert held - allocated() >= weights
        memory.sleep()
        refit = Refit(
            learner.model,
            engine,
            meshes,
            RefitConfig(bucket_bytes=BUCKET_BYTES, verify="every"),
            dtype=torch.bfloat16,
        )
        refit(version=1)  # compares digests
        assert len(dict(engine.generate([Request(prompt_ids=(3, 4), seed=0, max_response_tokens=4)]))) == 1
        memory.wake()
        for name, parameter in learner.model.model.named_parameters():
            assert torch.equal(engine.weights[name], parameter.full_tensor().bfloat16()), name
        del learner, memory, refit


@HANDOVER
def test_the_handover_catches_a_leak(qwen3: str) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        learner = start(qwen3, meshes)
        memory = TrainerMemory([learner], CUDA, moves="all")
        memory.sleep()
        engine = engine_for(qwen3, world)
        refit = Refit(
            learner.model,
            engine,
            meshes,
            RefitConfig(bucket_bytes=BUCKET_BYTES, verify="every"),
            dtype=torch.bfloat16,
        )
        free = read_memory(CUDA).free_bytes
        offload = OffloadConfig(trainer="all", engine=("kv_cache", "weights"))
        # A plan that leaves a GiB for the test, whatever the device.
        nothing: dict[str, Any] = dict.fromkeys((field.name for field in fields(MemoryPlan)), 0)
        plan = MemoryPlan(**nothing | {"gradients": free - GIB, "engine_share": None})
        handover = Handover(
            memory,
            engine,
            refit,
            meshes.training,
            offload,
            plan=plan,
            restart_engine=False,
            message=print,
            span=no_span,
        )
        handover.refit(version=0)
        with handover.rollout():
            pass
        with handover.training():
            pass
        leak = torch.empty(2 * GIB, dtype=torch.uint8, device=CUDA)
        with pytest.raises(MemoryShortage, match=r"engine asleep: rank 0 needs .* to train"), handover.rollout():
            pass
        edges = handover.take_edges()
        assert [edge.name for edge in edges][:3] == ["engine started", "refitted", "engine awake"]
        assert all(reading.total_bytes > 0 for edge in edges for reading in edge.readings)
        del learner, memory, refit, handover, leak


@HANDOVER
def test_random_states_of_the_device_are_kept_apart(qwen3: str) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        learner = start(qwen3, meshes)
        memory = TrainerMemory([learner], CUDA, moves="none")
        engine = engine_for(qwen3, world)
        refit = Refit(
            learner.model,
            engine,
            meshes,
            RefitConfig(bucket_bytes=BUCKET_BYTES, verify="first"),
            dtype=torch.bfloat16,
        )
        handover = Handover(
            memory,
            engine,
            refit,
            meshes.training,
            OffloadConfig(),
            plan=None,
            restart_engine=False,
            message=print,
            span=no_span,
        )
        handover.refit(version=0)
        torch.cuda.manual_seed(5)
        with handover.rollout():
            torch.rand(7, device=CUDA)
        drawn = torch.rand(3, device=CUDA)
        torch.cuda.manual_seed(5)
        assert torch.equal(drawn, torch.rand(3, device=CUDA))
        del learner, memory, refit, handover
