"""NCCL paths; they need two CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spmdrl.config import RefitConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.sglang.transport import cuda_ipc_problem
from spmdrl.model.load import load_policy
from spmdrl.refit.refit import Refit
from tests.helpers.configs import model_config
from tests.helpers.device_memory import shards
from tests.helpers.matrix import VOCABULARY, by_reward, matrix, require_same
from tests.helpers.models import save_qwen3, save_qwen3_moe
from tests.helpers.other_process import OtherProcess
from tests.helpers.parity import assert_same_change, initial, trained
from tests.helpers.ranks import run_ranks
from tests.helpers.refits import refit_differences

REFITS = pytest.mark.claim(
    "Several devices",
    "Refits on two devices: engine weights equal trainer weights, and each rank's buckets are opened on its own "
    "device.",
)
LAYOUTS = pytest.mark.claim(
    "Several devices",
    "Context, tensor and expert parallelism on two devices, and replicas of shards on four, give what one device "
    "gives.",
)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.claim("Several devices", "Two devices compute the gradients of one (FSDP over NCCL).")
def test_two_devices_give_the_gradients_of_one(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path)
    options = {"model": {"compute_dtype": "float32"}}
    one, two = (run_ranks(count, trained, {"step": (path, options)})[0]["step"][0] for count in (1, 2))
    assert_same_change({k: v.cpu() for k, v in one.items()}, {k: v.cpu() for k, v in two.items()}, initial(path), 1e-4)


@LAYOUTS
@pytest.mark.parametrize(
    ("save", "layouts"),
    [(save_qwen3, ("dp 2", "cp 2", "cp 2 (ulysses)", "tp 2")), (save_qwen3_moe, ("ep 2", "tp 2 x ep 2"))],
)
def test_layouts_of_two_devices_give_what_one_gives(
    tmp_path: Path, save: Callable[..., str], layouts: tuple[str, ...]
) -> None:
    options = {"num_experts": 8} if save is save_qwen3_moe else {}
    path = save(tmp_path, vocab_size=VOCABULARY, **options)
    require_same(matrix(by_reward(path, compute_dtype="float32"), lambda case: case.name in layouts))


@LAYOUTS
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_replicas_of_shards_give_what_one_device_gives(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path, vocab_size=VOCABULARY)
    require_same(matrix(by_reward(path, compute_dtype="float32"), lambda case: case.name.startswith("hsdp 2")))


@REFITS
def test_engine_weights_equal_trainer_weights(tmp_path: Path) -> None:
    for differences in run_ranks(2, refit_differences, (save_qwen3(tmp_path), torch.bfloat16, 1024)):
        assert differences == [[0.0, 0.0]]


def _opened_by_another_process(path: str) -> list[str]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path), meshes.model, temperature=1.0)
        engine = OtherProcess(world.device, transport="cuda_ipc")
        cfg = RefitConfig(bucket_bytes=2**14, verify="every")
        refit = Refit(policy, engine, meshes, cfg, dtype=torch.bfloat16)
        for version in range(3):
            with torch.no_grad():
                for shard in shards(policy):
                    shard.mul_(1.01).add_(0.001)
            refit(version=version)
        held = engine.weights()
        whole = {name: parameter.full_tensor().bfloat16().cpu() for name, parameter in policy.model.named_parameters()}
        engine.close()
        del policy, refit
        return [name for name in whole if not torch.equal(held[name], whole[name])]


@REFITS
def test_each_ranks_buckets_are_opened_on_its_own_device(tmp_path: Path) -> None:
    if problem := cuda_ipc_problem(torch.device("cuda", 0)):
        pytest.skip(problem)
    assert run_ranks(2, _opened_by_another_process, save_qwen3(tmp_path)) == [[], []]
