"""The real SGLang on a CUDA device with models of other layers: experts in fp8, gated delta nets."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.device_sizes import needs_kernels
from tests.helpers.models import save_qwen3_5, save_qwen3_moe, save_qwen3_next
from tests.helpers.sglang_runs import require_learnt, ten_steps
from tests.helpers.small_run import model_and_sums, write_config

pytestmark = [pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed"), needs_kernels]

# What blocks of 128 x 128 divide.
IN_BLOCKS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "head_dim": 64,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
# Heads as published models have them, for which kernels are made.
HEADS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def write_run(save: Callable[..., str], folder: Path, **sizes: Any) -> None:
    write_config(folder, **model_and_sums(save, folder, **sizes))


@pytest.mark.claim("SGLang on one device", "SGLang samples with experts in fp8, near the trainer.")
@pytest.mark.timeout(600)
def test_experts_in_fp8(tmp_path: Path) -> None:
    """Every refit compares the experts' integers by digest, in SGLang's layout. A token near two experts may go to
    another one."""
    write_run(save_qwen3_moe, tmp_path, **IN_BLOCKS)
    correction = ("correction.kind=tis", "debug.assert_on_policy=false")
    steps = ten_steps(tmp_path, 1, "rollout.quantization=fp8", "model.compute_dtype=bfloat16", *correction)
    require_learnt(steps, mean_nats=0.4)
    assert all(row["mismatch/mean_abs_nats"] > 0 for row in steps)


@pytest.mark.claim(
    "Whole machines", "SGLang samples from models with gated delta nets, and takes their weights in a refit."
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("save", "sizes"),
    [pytest.param(save_qwen3_next, EXPERTS, id="qwen3_next"), pytest.param(save_qwen3_5, {}, id="qwen3_5")],
)
def test_gated_delta_nets(tmp_path: Path, save: Callable[..., str], sizes: dict[str, int]) -> None:
    write_run(save, tmp_path, **HEADS, **sizes)
    # Otherwise its states get a part of the memory: this one engine may not be alone.
    require_learnt(ten_steps(tmp_path, 1, "rollout.sglang.max_mamba_cache_size=128"), mean_nats=0.1)
