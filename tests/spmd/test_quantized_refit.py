"""Weights that are quantized while they are gathered: any number of ranks sends the bytes of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from spmdrl.config import ParallelConfig, RefitConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model import fp8
from spmdrl.model.load import load_policy
from spmdrl.refit.bucket import Naming
from spmdrl.refit.digest import digest
from spmdrl.refit.gather import Gatherer
from spmdrl.refit.refit import Refit, RefitMismatch
from tests.helpers.configs import model_config
from tests.helpers.models import needs_expert_plans, save_qwen3, save_qwen3_moe
from tests.helpers.ranks import run_ranks

SIZES = {
    "vocab_size": 98,
    "hidden_size": 160,
    "intermediate_size": 272,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
}
EXPERTS = {
    "vocab_size": 98,
    "hidden_size": 136,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_hidden_layers": 1,
}
Sent = dict[str, tuple[str, list[int], str]]  # dtype, shape and digest, by name


def gathered(path: str, layouts: list[dict[str, Any]]) -> list[dict[str, Sent]]:
    """Send a policy from these layouts; return the tensors by the names of each kind."""
    found = []
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        for layout in layouts:
            meshes = build_meshes(world, ParallelConfig(**layout)).model
            policy = load_policy(model_config(path), meshes, temperature=1.0)
            namings: tuple[Naming, ...] = ("model", "checkpoint")
            of_layout: dict[str, Sent] = {}
            for naming in namings:
                gatherer = Gatherer(
                    policy, meshes.copy, dtype=torch.bfloat16, bucket_bytes=2**16, naming=naming, quantize=True
                )
                assert len(gatherer.buckets) > 2
                of_layout[naming] = {
                    name: (str(tensor.dtype), list(tensor.shape), digest(tensor.clone()))
                    for bucket in gatherer.whole_tensors()
                    for name, tensor in bucket
                }
            found.append(of_layout)
    return found


@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=needs_expert_plans)])
def test_ranks_send_the_bytes_of_one_rank(tmp_path: Path, experts: bool) -> None:
    path = save_qwen3_moe(tmp_path, **EXPERTS) if experts else save_qwen3(tmp_path, **SIZES)
    ((alone,),) = run_ranks(1, gathered, path, [{}])
    layouts = [{}, {"tp": 2}, {"dp_replicate": 2}] + ([{"ep": 2}] if experts else [])
    for of_rank in run_ranks(2, gathered, path, layouts):
        assert of_rank == [alone] * len(layouts)
    sent = alone["checkpoint"]
    weight = "model.layers.0.mlp.experts.3.up_proj.weight" if experts else "model.layers.2.mlp.up_proj.weight"
    assert sent[weight][0] == "torch.float8_e4m3fn"
    assert sent[f"{weight}_scale_inv"][:2] == ("torch.float32", [1, 2] if experts else [3, 2])
    assert not any(
        "norm" in name or "embed" in name or ".gate." in name for name in sent if sent[name][0] != "torch.bfloat16"
    )


def refits(path: str) -> str:
    """Refit the engine, compare its weights, and let a bit of the numbers fall over."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path), meshes.model, temperature=1.0)
        config = AutoConfig.from_pretrained(path)
        engine = TorchEngine(config, device=world.device, dtype=torch.bfloat16, kernel="sdpa", max_running=4)
        cfg = RefitConfig(bucket_bytes=2**16, verify="every")
        refit = Refit(policy, engine, meshes, cfg, dtype=torch.bfloat16, quantize=True)
        for version in range(2):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.to_local().mul_(1.01).add_(0.001)
            refit(version=version)
            for name, parameter in policy.model.named_parameters():
                whole = expected = parameter.full_tensor().detach().bfloat16()
                if fp8.is_quantized(name, whole.ndim):
                    maxima = fp8.block_maxima(whole)
                    expected = fp8.dequantized(fp8.quantized(whole, maxima), fp8.scales_of(maxima))
                assert torch.equal(engine.weights[name], expected.bfloat16()), name
        load = engine.load

        def corrupt(number: int) -> None:
            engine._buffers[number % 2][engine._buckets[number].num_bytes - 1] ^= (
                1  # of the e4m3 numbers, which are last
            )
            load(number)

        engine.load = corrupt  # type: ignore[method-assign]
        try:
            refit(version=2)
        except RefitMismatch as error:
            return str(error)
    return "nothing was noticed"


def test_the_torch_engine_has_what_e4m3_stands_for(tmp_path: Path) -> None:
    for said in run_ranks(2, refits, save_qwen3(tmp_path, **SIZES, num_hidden_layers=1)):
        assert "does not hold the trainer's weights" in said and "_proj.weight" in said
