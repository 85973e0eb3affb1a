"""What is on a device beside tensors: the groups that are counted are those that are made, and who has which part."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from spmdrl.config import Config, ParallelConfig
from spmdrl.config.plan import layouts, make_plan
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import World
from spmdrl.memory import overhead as o
from spmdrl.memory.activations import Decoder, forward_bytes
from spmdrl.memory.overhead import Overhead, device_overheads, num_communicators
from tests.helpers.configs import minimal_config

DECODER = Decoder(
    num_layers=2,
    hidden=64,
    query_width=64,
    key_width=32,
    query_heads=2,
    head_width=32,
    mlp_width=128,
    experts_per_token=0,
    norms=2,
    has_head_norms=True,
    vocabulary=1000,
)
PROCESS = {"context": o.CONTEXT_BYTES, "kernels": o.KERNEL_BYTES, "cuBLAS": o.CUBLAS_BYTES}
ENGINE = {f"engine {part}": size for part, size in PROCESS.items()}
ROLLOUT = {"engine": "sglang", "max_running": 100}


def overheads(num_ranks: int, **sections: Any) -> tuple[Overhead, Overhead]:
    cfg = minimal_config(**sections)
    return device_overheads(cfg, make_plan(cfg, num_ranks=num_ranks), DECODER, compute_bytes=2)


@pytest.fixture
def eight_ranks() -> Iterator[World]:
    """Rank 0 of eight that are not there."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield World(
        rank=0,
        num_ranks=8,
        local_rank=0,
        num_local_ranks=8,
        patience=timedelta(minutes=1),
        device=torch.device("cpu"),
    )
    dist.destroy_process_group()


def groups_of(meshes: Meshes) -> set[str]:
    """The groups of more than one rank over which tensors on a device are exchanged."""
    model = meshes.model
    axes: list[DeviceMesh] = [meshes.training, meshes.data, model.copy, model.cp]
    for mesh in (model.dense, model.expert):
        axes += [mesh[name] for name in mesh.mesh_dim_names or ()] if mesh is not None else []
    for other in meshes.others.values():
        for mesh in (other.dense, other.expert):  # gradients, which are summed over copies, are the policy's alone
            names = [name for name in mesh.mesh_dim_names or () if name != "replicate"] if mesh is not None else []
            axes += [mesh[name] for name in names] if mesh is not None else []
    if meshes.weights is not None:
        axes.append(meshes.weights)
    return {axis.get_group().group_name for axis in axes if axis.size() > 1}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"parallel": {"dp_replicate": 2}},
        {"parallel": {"cp": 2}},
        {"parallel": {"tp": 8}},
        {"parallel": {"ep": 4}},
        {"parallel": {"dp_replicate": 2, "ep": 4}},
        {"parallel": {"cp": 2, "tp": 2}},
        {"models": {"t": {"path": "t", "parallel": {"dp_replicate": 2, "ep": 2}}}, "distill": {"teacher": "t"}},
        {"rollout": {"placement": "disaggregated", "num_ranks": 4}},
    ],
    ids=str,
)
def test_every_group_that_communicates_is_counted(sections: dict[str, Any], eight_ranks: World) -> None:
    cfg: Config = minimal_config(**sections)
    plan = make_plan(cfg, num_ranks=8)
    parallel = ParallelConfig.model_validate(sections.get("parallel", {}))
    meshes = build_meshes(eight_ranks, parallel, engine_ranks=plan.engine_ranks, layouts=layouts(cfg))
    assert num_communicators(cfg, plan) == len(groups_of(meshes))


def test_one_process_on_one_device_has_its_context_alone() -> None:
    training, engine = overheads(1)
    assert training == engine == Overhead(rank=PROCESS)


def test_an_engine_of_its_own_process_has_a_second_context_and_more_while_it_samples() -> None:
    (overhead, same) = overheads(1, rollout=ROLLOUT)
    graphs = {"engine graphs": 100 * 2 * 2**20}
    # A chunk of prompts takes more than the logits of 100 sequences.
    layer = forward_bytes(DECODER, compute_bytes=2, num_tokens=8192)
    assert layer > 4 * 4 * 100 * 1000
    assert overhead == same
    assert overhead.at_launch == 2 * sum(PROCESS.values())
    assert overhead.while_training == PROCESS | ENGINE | graphs
    assert overhead.while_sampling == PROCESS | ENGINE | graphs | {"engine workspace": 512 * 2**20 + layer}


def test_graphs_are_those_of_the_largest_batch_unless_there_are_none() -> None:
    def graphs(**rollout: Any) -> int:
        return o.graph_bytes(minimal_config(rollout=ROLLOUT | rollout))

    sizes = [{}, {"max_running": 1000}, {"max_running": 1000, "tp_size": 4}, {"cuda_graphs": False}]
    assert [graphs(**rollout) // o.GRAPH_BYTES for rollout in sizes] == [100, 256, 512, 0]
    released = {"rollout": ROLLOUT, "offload": {"engine": ["kv_cache", "cuda_graph"]}}
    (overhead, _) = overheads(1, **released)
    assert "engine graphs" in overhead.while_sampling and "engine graphs" not in overhead.while_training


def test_many_sequences_sample_from_more_than_a_chunk_of_prompts_takes() -> None:
    cfg = minimal_config(rollout=ROLLOUT | {"max_running": 4096, "chunked_prefill_tokens": 16})
    assert o.workspace_bytes(cfg, DECODER, compute_bytes=2) == 512 * 2**20 + 4 * 4 * 4096 * 1000


def test_devices_of_one_side_carry_that_side() -> None:
    apart = ROLLOUT | {"placement": "disaggregated", "num_ranks": 4}
    training, engine = overheads(8, rollout=apart)
    groups = {"NCCL": 5 * o.NCCL_BYTES}
    assert training.while_sampling == training.while_training == PROCESS | groups
    assert engine.rank == PROCESS | {"NCCL": o.NCCL_BYTES} and engine.engine == ENGINE
    assert {"engine graphs", "engine workspace"} <= engine.while_sampling.keys()


def test_ranks_that_share_an_engine_communicate_in_its_processes_too() -> None:
    (overhead, _) = overheads(8, rollout=ROLLOUT | {"tp_size": 2})
    assert overhead.engine == ENGINE | {"engine NCCL": 2 * o.NCCL_BYTES}
