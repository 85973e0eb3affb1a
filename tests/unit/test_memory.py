"""The memory plan, where the arithmetic can be done by hand, and how memory is shown."""

from __future__ import annotations

import itertools
import mmap
import re
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from spmdrl.config import Config
from spmdrl.memory.device import (
    GIB,
    MemoryPlan,
    ModelSize,
    ShardLayout,
    engine_problems,
    full_bucket,
    memory_problems,
    model_size,
    plan_memory,
)
from spmdrl.memory.overhead import Overhead
from spmdrl.model.load import parameter_shapes
from spmdrl.model.offload import BLOCK_BYTES, HostBuffers, plan_blocks
from spmdrl.report.memory import Edge, MemoryReading, edge_row, memory_table, resident_bytes
from tests.helpers.configs import minimal_config, model_config
from tests.helpers.models import save_llama, save_qwen3

BILLION = ModelSize(whole=2**30, shard=2**27, root=2**27, largest_layer=2**25)  # on 8 ranks
CUDA = Overhead(rank={"context": GIB})


def planned(size: ModelSize = BILLION, *, device_gib: float = 80, share: float | None = None, **sections: Any):
    """The plan and its problems; `share` stands for an engine that takes this part of the free memory."""
    cfg = minimal_config(**sections)
    if share is not None:
        rollout = cfg.rollout.model_copy(update={"engine": "sglang", "memory_fraction": share})
        cfg = cfg.model_copy(update={"rollout": rollout})
    device_bytes = int(device_gib * GIB)
    plan = plan_memory(
        cfg,
        size,
        num_ranks=8,
        compute_bytes=2,
        device_bytes=device_bytes,
        bucket_bytes=2**28,
        overhead=CUDA,
    )
    return plan, list(memory_problems(plan, cfg, device_bytes=device_bytes))


def test_a_plan_counts_every_part() -> None:
    plan, problems = planned()
    assert plan == MemoryPlan(
        weights=GIB // 2,
        gradients=GIB // 2,
        optimizer=GIB,
        gathered=2 * (2**27 + 2**25),
        buckets=2 * 2**28 + 2**28 + 2**25,
        cast=0,
        moved=0,
        engine_weights=2 * GIB,
        free_at_launch=79 * GIB - GIB // 2,
        engine_share=None,
        engine_keeps=2 * GIB,
        overhead=CUDA,
    )
    assert plan.awake == 2 * GIB + plan.gathered
    assert not problems


@pytest.mark.parametrize(("asked", "full"), [(10, 14), (20, 20), (200, 100)])
def test_a_bucket_holds_the_largest_weight_and_no_more_than_the_model(asked: int, full: int) -> None:
    size = ModelSize(whole=50, shard=50, root=0, largest_layer=0, largest_weight=7)
    assert full_bucket(asked, size, compute_bytes=2) == full


def test_what_offload_moves_is_not_there() -> None:
    assert [planned(offload={"trainer": trainer})[0].asleep for trainer in ("none", "optimizer", "all")] == [
        3 * GIB // 2,
        GIB // 2,
        0,
    ]
    casts = [
        planned(replace(BILLION, largest_weight=800), offload={"trainer": x})[0].cast for x in ("optimizer", "all")
    ]
    assert casts == [0, 800 * 4 // 8]  # a refit brings a rank's part of it from the host in float32
    assert planned(replace(BILLION, largest_weight=800), model={"cpu_offload": True})[0].cast == 800 * 4 // 8
    assert planned(replace(BILLION, largest_weight=800, adapters=1), offload={"trainer": "all"})[0].cast == 0
    assert planned(offload={"engine": ["kv_cache", "weights"]})[0].engine_keeps == 0
    assert planned(model={"cpu_offload": True})[0].awake == 2 * (2**27 + 2**25)
    assert planned(optim={"name": "sgd"})[0].optimizer == 0
    assert planned(optim={"name": "sgd", "momentum": 0.9})[0].optimizer == GIB // 2


def test_before_the_first_update_the_optimizers_state_is_still_to_come() -> None:
    plan, _ = planned()
    assert plan.to_train(brought_back=7, has_optimizer_state=True) == 7 + plan.training
    assert plan.to_train(brought_back=7, has_optimizer_state=False) == 7 + plan.training + plan.optimizer


def test_an_engine_with_a_share_keeps_its_cache_unless_told_otherwise() -> None:
    plan, problems = planned(share=0.5, offload={"engine": ["weights"]})
    assert plan.engine_share == int(0.5 * plan.free_at_launch)
    assert plan.engine_keeps == plan.engine_share - plan.engine_weights
    assert not problems


def test_a_fraction_that_does_not_fit_is_refused_with_one_that_does() -> None:
    _, (problem,) = planned(share=0.99)
    assert problem.startswith("rollout.memory_fraction = 0.99 gives the engine 77.7 GiB of the device's 80.0 GiB")
    assert "the trainer keeps 1.5 GiB" in problem
    assert problem.endswith('set it to 0.97 or less or set offload.trainer = "optimizer" or "all"')
    assert not planned(share=0.97)[1]


def test_a_fraction_below_the_engines_weights_is_refused() -> None:
    _, (problem,) = planned(share=0.02)
    assert "its weights alone take 2.0 GiB; raise it" in problem


def test_training_that_does_not_fit_beside_a_sleeping_engine_is_refused() -> None:
    _, (problem,) = planned(device_gib=5.5, offload={"trainer": "all"})
    assert problem.startswith("training takes 2.3 GiB before any activation (weights 0.5 GiB, gradients 0.5 GiB")
    assert 'add "weights" to offload.engine, use more ranks' in problem
    assert not planned(device_gib=5.5, offload={"trainer": "all", "engine": ["kv_cache", "weights"]})[1]


def test_sampling_that_does_not_fit_beside_a_sleeping_trainer_is_refused() -> None:
    problems = planned(device_gib=5)[1]
    assert any("while the engine samples" in problem and 'offload.trainer = "all"' in problem for problem in problems)
    (problem,) = planned(device_gib=1.2)[1]
    assert "weights alone" in problem


def test_a_device_that_holds_one_side_is_planned_for_that_side() -> None:
    apart = {"placement": "disaggregated", "num_ranks": 2}
    plan, problems = planned(rollout=apart)
    assert not problems
    assert (plan.engine_weights, plan.engine_keeps, plan.engine_share) == (0, 0, None)
    _, (problem,) = planned(rollout=apart, device_gib=3)
    assert "together more than the device's 3.0 GiB" in problem and "sleeping engine" not in problem
    cfg = minimal_config(rollout=apart)

    def sentences(device_gib: float, cfg: Config = cfg) -> list[str]:
        sizes = {"compute_bytes": 2, "device_bytes": int(device_gib * GIB), "bucket_bytes": 2**28}
        return list(engine_problems(cfg, BILLION, CUDA, **sizes))

    assert not sentences(4)
    (problem,) = sentences(3)
    assert problem.startswith("an engine's weights take 2.0 GiB and a bucket of a refit 0.2 GiB, of the 2.0 GiB")

    def with_share(share: float) -> list[str]:
        rollout = cfg.rollout.model_copy(update={"engine": "sglang", "memory_fraction": share})
        return sentences(11, cfg.model_copy(update={"rollout": rollout}))

    assert not with_share(0.97)  # 9.7 of 10 GiB, and 0.25 for the bucket
    (problem,) = with_share(0.98)
    assert problem.startswith(
        "rollout.memory_fraction = 0.98 gives an engine 9.8 GiB, and an engine's weights take 2.0"
    )
    assert not with_share(0.2)
    (problem,) = with_share(0.19)
    assert problem.startswith(
        "rollout.memory_fraction = 0.19 gives an engine 1.9 GiB, and an engine's weights take 2.0"
    )


@pytest.mark.parametrize("save", [save_qwen3, save_llama])
def test_sizes_are_those_of_the_model(tmp_path, save) -> None:
    from transformers import AutoModelForCausalLM

    path = save(tmp_path)
    parameters = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    size = model_size(
        *parameter_shapes(AutoConfig.from_pretrained(path), model_config(path)), layout=ShardLayout(copy_ranks=2)
    )
    assert size.whole == sum(p.numel() for p in parameters.values())
    layer = sum(p.numel() for name, p in parameters.items() if ".layers.1." in name)
    assert size.largest_layer == layer
    assert size.root == sum(p.numel() for name, p in parameters.items() if ".layers." not in name)
    padding = sum(p.numel() // len(p) for p in parameters.values() if len(p) % 2)
    assert size.shard == (size.whole + padding) // 2


def test_blocks_are_powers_of_two_and_hold_everything_once() -> None:
    sizes = {"big": BLOCK_BYTES + 1, "half": BLOCK_BYTES // 2, "a": 1000, "b": 3, "c": 512 * 7}
    blocks, places = plan_blocks(sizes)
    assert all(size & (size - 1) == 0 for size in blocks)
    assert sum(blocks) <= 2 * BLOCK_BYTES  # the small ones fill what the big one's block has left
    taken = sorted((block, start, start + sizes[name]) for name, (block, start) in places.items())
    assert all(start % 512 == 0 and end <= blocks[block] for block, start, end in taken)
    assert all(one[0] != two[0] or one[2] <= two[1] for one, two in itertools.pairwise(taken))
    assert plan_blocks({}) == ([], {})


def test_host_buffers_are_allocated_once() -> None:
    buffers = HostBuffers(pinned=False)
    first = buffers.take({"weights": 1000, "moments": 2000})
    size = buffers.num_bytes
    again = buffers.take({"moments": 2000, "weights": 1000})
    assert {name: x.data_ptr() for name, x in first.items()} == {name: x.data_ptr() for name, x in again.items()}
    assert buffers.num_bytes == size == 4096
    assert [len(x) for x in buffers.take({"weights": 1000, "moments": 3000}).values()] == [1000, 3000]


def test_the_table_shows_the_range_over_ranks_and_only_what_there_is() -> None:
    def edge(name: str, *host_gib: float) -> Edge:
        return Edge(name, 0.25, tuple(MemoryReading(host_bytes=int(x * GIB)) for x in host_gib))

    edges = [edge("engine awake", 1.0, 1.5), edge("engine asleep", 1.0, 1.0)]
    assert memory_table(3, edges).splitlines() == [
        "memory in step 3, GiB, on 2 ranks",
        "  edge              s       host",
        "  engine awake   0.25  1.00-1.50",
        "  engine asleep  0.25       1.00",
    ]
    row = edge_row(edges[0])
    assert row["edge"] == "engine awake" and row["host_gib"] == [1.0, 1.5] and row["free_gib"] == [0.0, 0.0]
    assert memory_table(3, []) == ""


def test_resident_memory_is_that_of_this_process() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 64 * 2**20) as held:
        held.write(b"x" * len(held))
        assert 50 * 2**20 < resident_bytes() - before < 200 * 2**20


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {"model": {"path": "m", "checkpoint_every_layers": 2}},
            'checkpoint_every_layers = 2 has no meaning with gradient_checkpointing = "none"',
        ),
        (
            {"optim": {"lr": 1e-3, "state_on_host": True}, "offload": {"trainer": "optimizer"}},
            'nothing for offload.trainer = "optimizer" to move; set it to "all" or "none"',
        ),
        (
            {"optim": {"lr": 1e-3, "state_on_host": True}, "model": {"path": "m", "cpu_offload": True}},
            "model.cpu_offload = true runs the optimizer on the host",
        ),
        (
            {"optim": {"name": "sgd", "lr": 1e-3, "state_on_host": True}},
            'name = "sgd" with momentum = 0 has no state; remove it',
        ),
    ],
)
def test_levers_that_move_nothing_are_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        minimal_config(**sections)
