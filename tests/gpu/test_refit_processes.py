"""Weights reach another process through CUDA IPC and through host memory bit for bit, and refits leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from spmdrl.config import RefitConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.sglang.transport import cuda_ipc_problem
from spmdrl.model import fp8
from spmdrl.model.load import load_policy
from spmdrl.model.policy import Policy
from spmdrl.refit.digest import digests
from spmdrl.refit.refit import Refit, RefitMismatch
from tests.helpers.configs import model_config
from tests.helpers.device_memory import shards
from tests.helpers.device_sizes import sized
from tests.helpers.models import save_qwen3
from tests.helpers.other_process import OtherProcess

CUDA_IPC = pytest.mark.claim(
    "Weights reach the engine",
    "Through CUDA IPC another process holds the weights bit for bit; buckets are complete when they are read; a "
    "flipped bit is noticed; 50 refits leave nothing behind.",
)
SHARED_MEMORY = pytest.mark.claim(
    "Weights reach the engine",
    "Through pinned shared memory another process holds the weights bit for bit; 50 refits leave nothing behind.",
)

MIB = 2**20
NUM_REFITS = sized(50, emulated=20)
BUCKET_BYTES = sized(8 * MIB, emulated=MIB)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 24 million parameters, so that a bucket left behind would be seen; on an emulated device 1.7 million."""
    sizes = sized(
        {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 128},
        emulated={"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 32},
    )
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), **sizes)


@contextmanager
def refitted(path: str, transport: str, verify: str) -> Iterator[tuple[Policy, OtherProcess, Refit]]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path), meshes.model, temperature=1.0)
        engine = OtherProcess(world.device, transport=transport)
        cfg = RefitConfig(bucket_bytes=BUCKET_BYTES, verify=verify)
        refit = Refit(policy, engine, meshes, cfg, dtype=torch.bfloat16)
        try:
            yield policy, engine, refit
        finally:
            engine.close()
            del policy, refit


@torch.no_grad()
def change(policy: Policy) -> None:
    for shard in shards(policy):
        shard.mul_(1.01).add_(0.001)


def skip_without(transport: str) -> None:
    if transport == "cuda_ipc" and (problem := cuda_ipc_problem(torch.device("cuda", 0))):
        pytest.skip(problem)


@CUDA_IPC
def test_the_check_answers() -> None:
    problem = cuda_ipc_problem(torch.device("cuda", 0))
    assert problem is None or problem.startswith("one process cannot open another's device memory (")


@CUDA_IPC.with_args(case="cuda_ipc")
@SHARED_MEMORY.with_args(case="shared_memory")
@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
def test_another_process_holds_the_weights_bit_for_bit(qwen3: str, transport: str) -> None:
    skip_without(transport)
    with refitted(qwen3, transport, "every") as (policy, engine, refit):
        for version in range(4):
            change(policy)
            refit(version=version)
        held = engine.weights()
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(held[name], parameter.full_tensor().bfloat16().cpu()), name


@CUDA_IPC
def test_a_bucket_is_not_read_before_it_is_complete(qwen3: str) -> None:
    """Work that the stream has still to do when a bucket is handed over belongs to it."""
    skip_without("cuda_ipc")
    with refitted(qwen3, "cuda_ipc", "every") as (policy, _, refit):
        fill = refit._gatherer.fill

        def late(bucket, flat) -> None:
            torch.cuda._sleep(200_000_000)  # clock cycles: a tenth of a second
            fill(bucket, flat)

        refit._gatherer.fill = late  # type: ignore[method-assign]
        for version in range(2):
            change(policy)
            refit(version=version)


@pytest.mark.kernels
@CUDA_IPC
def test_digests_on_the_device_are_the_hosts() -> None:
    torch.manual_seed(0)
    table = torch.randn(2, 2**17)  # two whole tables of a digest
    weights = {
        "one": [torch.randn(1)],
        "odd": [torch.randn(3, 2**15 + 1).bfloat16()],
        "parts": [table, table.neg(), torch.randn(5, 7)],
        "shifted": [torch.randn(2**16 + 3)[1:]],
        "large": [torch.randn(sized(300, emulated=5), 2**16)],
    }
    assert digests({name: [x.cuda() for x in parts] for name, parts in weights.items()}) == digests(weights)


@pytest.mark.claim("Weights reach the engine", "Weights are quantized to e4m3 on a device with the bits of the host.")
@pytest.mark.parametrize("first", [(0, 0), (70, 130)])
def test_e4m3_numbers_of_the_device_are_the_hosts(first: tuple[int, int]) -> None:
    """A part has all blocks to itself, or begins and ends inside of blocks."""
    weight = torch.randn(sized(4096, emulated=330), 290, generator=torch.Generator().manual_seed(0)).bfloat16()
    maxima = fp8.block_maxima(weight, first)
    numbers = fp8.quantized(weight, maxima, first)
    assert torch.equal(fp8.block_maxima(weight.cuda(), first).cpu(), maxima)
    assert torch.equal(fp8.scales_of(maxima.cuda()).cpu(), fp8.scales_of(maxima))
    found = fp8.quantized(weight.cuda(), maxima.cuda(), first).cpu()
    assert torch.equal(found.view(torch.uint8), numbers.view(torch.uint8))


@CUDA_IPC
def test_a_flipped_bit_is_noticed(qwen3: str) -> None:
    skip_without("cuda_ipc")
    with refitted(qwen3, "cuda_ipc", "every") as (_, engine, refit):
        load = engine.load

        def corrupt(number: int) -> None:
            if number == 1:
                refit._buffers[1][40] ^= 1
            load(number)

        engine.load = corrupt  # type: ignore[method-assign]
        with pytest.raises(RefitMismatch):
            refit(version=0)


@CUDA_IPC.with_args(case="cuda_ipc")
@SHARED_MEMORY.with_args(case="shared_memory")
@pytest.mark.parametrize("transport", ["cuda_ipc", "shared_memory"])
def test_refits_take_no_more_device_memory(qwen3: str, transport: str) -> None:
    skip_without(transport)
    with refitted(qwen3, transport, "first") as (policy, _, refit):
        for version in range(5):
            refit(version=version)
        torch.cuda.synchronize()
        allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        for version in range(5, 5 + NUM_REFITS):
            change(policy)
            refit(version=version)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= allocated + MIB
        assert torch.cuda.mem_get_info()[0] >= free - 8 * MIB  # of both processes; buckets that stayed would be more
