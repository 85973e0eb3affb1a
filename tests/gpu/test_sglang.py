"""The real SGLang on CUDA devices: refits, sleep and wake, a whole run. They skip where it cannot be imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.device_sizes import needs_kernels
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sglang_engine import answers, change, greedy, prompts, rank_with_engine, settings
from tests.helpers.sglang_runs import BACKENDS, ten_steps
from tests.helpers.small_run import sums_from_files, write_small_run

pytestmark = [pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"), needs_kernels]

LIMIT_S = 540.0  # kernels are compiled at the first start
ENGINE: dict[str, Any] = BACKENDS | {"memory_fraction": 0.3}
SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8, "vocab_size": 1024}
MIB = 2**20


def free_bytes() -> int:
    """Of the device, with nothing of this process's that is not in use."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def slept_and_woke(path: str, transport: str) -> dict[str, Any]:
    """Free device memory with the engine awake, asleep and awake again, and greedy tokens before and after.

    They answer one request: those that run together may be batched in another way the second time, and in bfloat16 two
    tokens are often equally likely. Three together, for which the graph of four is used, must only come to their end.
    """
    cfg = settings(path, 1, refit={"transport": transport, "bucket_bytes": MIB}, **ENGINE)
    with rank_with_engine(cfg) as rank:
        found: dict[str, Any] = {}
        change(rank.policy, 0.01)
        rank.refit(version=0)  # compares every weight by digest
        rank.engine.wake()
        *together, alone = [greedy(ids, 16) for ids in prompts(4)]
        found["before"] = answers(rank.engine, [alone])[0].token_ids
        found["awake"] = free_bytes()
        rank.engine.sleep()
        found["asleep"] = free_bytes()
        rank.refit(version=1)  # brings the memory of the weights back
        rank.engine.wake()
        found["awake again"] = free_bytes()
        found["after"] = answers(rank.engine, [alone])[0].token_ids
        found["together"] = [len(answer.token_ids) for answer in answers(rank.engine, together)]
        return found


@pytest.mark.claim(
    "SGLang on one device", "Its sleep gives the memory back, its wake takes it again, and it answers as before."
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
def test_sleep_gives_the_memory_back_and_wake_takes_it(tmp_path: Path, transport: str) -> None:
    (found,) = run_ranks(1, slept_and_woke, save_qwen3(tmp_path, **SHAPE), transport, timeout_s=LIMIT_S)
    total = torch.cuda.get_device_properties(0).total_memory
    assert found["asleep"] - found["awake"] > 0.2 * total  # the cache had 0.3 of what was free
    assert abs(found["awake again"] - found["awake"]) < 512 * MIB
    assert found["before"] == found["after"]
    assert found["together"] == [16] * 3


def fill_free_memory() -> None:
    """Leave a pattern in almost all of what is free: as places in the engine's cache, all far beyond its end."""
    size = int(0.9 * free_bytes()) // 4
    torch.full((size,), 0x7F7F7F7F, dtype=torch.int32, device="cuda")
    free_bytes()  # gives it back to the device


def woke_to_batches(path: str, sizes: list[int]) -> list[list[int]]:
    """The tokens sampled of each request, in batches of these sizes after each of two sleeps."""
    with rank_with_engine(settings(path, 1, refit={"bucket_bytes": MIB}, **ENGINE)) as rank:
        lengths = []
        rank.refit(version=0)
        for version in (1, 2):
            rank.engine.sleep()
            fill_free_memory()
            rank.refit(version=version)
            rank.engine.wake()
            for size in sizes:
                sampled = answers(rank.engine, [greedy(ids, 16) for ids in prompts(size)])
                lengths.append([len(answer.token_ids) for answer in sampled])
        return lengths


@pytest.mark.claim("SGLang on one device", "After a wake, batches that are padded to a CUDA graph read no garbage.")
@pytest.mark.timeout(600)
def test_batches_that_are_padded_to_a_graph_read_no_garbage_after_a_wake(tmp_path: Path) -> None:
    """The rows of padding stand in memory that was given back; out of bounds, they end the engine's process."""
    sizes = [3, 5, 11]  # between those of the graphs: 1, 2, 4, 8, 12, 16
    (lengths,) = run_ranks(1, woke_to_batches, save_qwen3(tmp_path, **SHAPE), sizes, timeout_s=LIMIT_S)
    assert lengths == [[16] * size for size in sizes] * 2


def shared_by_two(path: str) -> int:
    """Refit one engine on two devices three times; every weight is compared by digest."""
    cfg = settings(path, 2, tp_size=2, **ENGINE)
    with rank_with_engine(cfg) as rank:
        for version in range(3):
            change(rank.policy, 0.01)
            rank.refit(version=version)
        return rank.engine.version


@pytest.mark.claim("Several devices", "One SGLang engine on two devices holds the trainer's weights.")
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_engine_on_two_devices_holds_the_trainers_weights(tmp_path: Path) -> None:
    assert run_ranks(2, shared_by_two, save_qwen3(tmp_path, **SHAPE), timeout_s=LIMIT_S) == [2, 2]


def short_run(folder: Path, num_ranks: int, *overrides: str, hidden_size: int = 64) -> list[dict[str, Any]]:
    """The metrics of ten steps of a model of text."""
    write_small_run(folder, model={"hidden_size": hidden_size, "num_layers": 2}, **sums_from_files(folder))
    return ten_steps(folder, num_ranks, *overrides)


@pytest.mark.claim("SGLang on one device", "A run shares the device with SGLang, and learns.")
@pytest.mark.timeout(600)
def test_a_short_run_shares_the_device_and_learns(tmp_path: Path) -> None:
    steps = short_run(tmp_path, 1, 'offload.engine=["kv_cache", "weights"]', "offload.trainer=all")
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]
    assert all(row["mismatch/max_abs_nats"] < 0.5 for row in steps)


@pytest.mark.claim("SGLang on one device", "SGLang samples with weights, keys and values in fp8, near the trainer.")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fewer", ["rollout.quantization=fp8", "rollout.kv_cache_dtype=fp8_e4m3"])
def test_a_short_run_samples_in_fp8(tmp_path: Path, fewer: str) -> None:
    """Every refit compares integers by digest. In float32 and bfloat16 alone the mismatch is below 0.5."""
    correction = ("correction.kind=tis", "debug.assert_on_policy=false", "model.compute_dtype=bfloat16")
    steps = short_run(tmp_path, 1, fewer, *correction, hidden_size=256)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]
    assert all(0 < row["mismatch/mean_abs_nats"] < 0.2 for row in steps)


@pytest.mark.claim("Several devices", "One device trains while another samples (disaggregated).")
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_device_trains_while_the_other_samples(tmp_path: Path) -> None:
    """Every refit goes over NCCL into SGLang's process, and is compared by digest."""
    apart = ('rollout.placement="disaggregated"', "rollout.num_ranks=1", "rollout.max_staleness=1")
    steps = short_run(tmp_path, 2, *apart, "debug.assert_on_policy=false")
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]
    assert [row["rollout/max_staleness_steps"] for row in steps] == [0, *[1] * 9]
    assert all(row["refit/probe_max_abs_nats"] < 0.5 for row in steps)
