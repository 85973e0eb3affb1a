"""Adapters on one CUDA device, with the embedded engine; bases in few bits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from spmdrl.config import LoraConfig, ModelConfig, OptimConfig, ParallelConfig
from spmdrl.config.model import QuantizedBase
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.memory.device import training_memory
from spmdrl.model.linear import linear
from spmdrl.model.load import load_model_config
from spmdrl.model.lora.policy import load_trained
from spmdrl.model.lora.quantized import QuantizedLinear, bytes_of
from spmdrl.preflight.forecast import Model
from tests.helpers.device_memory import allocated
from tests.helpers.device_sizes import EMULATED, sized
from tests.helpers.models import save_qwen3
from tests.helpers.small_run import model_and_sums, rows, sample_rows, torchrun, write_config

FEW_BITS = pytest.mark.claim(
    "Adapters",
    "A base in 4 or 8 bits computes on CUDA what it computes on a CPU, in less memory, as the planner says.",
)
BASES = pytest.mark.parametrize("base", ["nf4", "8bit"])
needs_bits = pytest.mark.skipif(
    EMULATED or find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes, and a device that is not emulated: it has kernels of its own",
)


@pytest.mark.claim(
    "Adapters", "Adapters on a frozen base in bfloat16 learn; the embedded engine samples with them after each refit."
)
@pytest.mark.timeout(sized(240, emulated=900))
def test_adapters_on_a_base_in_bfloat16_learn(tmp_path: Path) -> None:
    write_config(tmp_path, **model_and_sums(save_qwen3, tmp_path, hidden_size=64, head_dim=32))
    settings = ("lora.rank=8", "model.compute_dtype=bfloat16", "report.samples_per_step=100", "run.num_steps=10")
    torchrun(tmp_path, 1, "run.deterministic=false", *settings)
    run = tmp_path / "runs/run"
    steps = rows(run)[1:]
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]
    assert all(0 < row["mismatch/mean_abs_nats"] < 0.02 for row in steps)
    sampled = {(row["step"], row["version"]) for row in sample_rows(run) if "response" in row}
    assert sampled == {(step, step - 1) for step in range(1, 11)}


def in_few_bits(base: str, weight: Tensor) -> QuantizedLinear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    vars(layer).update(base=base, multiply=linear)
    layer.__class__ = QuantizedLinear
    quantized = cast(QuantizedLinear, layer)
    quantized.keep(weight)
    return quantized


def product_and_slope(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    product = layer(leaf)
    slope = torch.randn(product.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(product)
    product.backward(slope)
    assert leaf.grad is not None
    return product.detach().float().cpu(), leaf.grad.float().cpu()


@FEW_BITS
@needs_bits
@BASES
def test_a_layer_in_few_bits_computes_what_it_computes_on_a_cpu(base: str) -> None:
    """A number in the middle between two levels may go to either, by at most a step of the levels: both are as near.

    Numbers in bfloat16 lie there often: 0.24 % of these in 8 bits do, as an H100 and the nearest levels in float64 say.
    Products in bfloat16 are then compared with those in float32 of the same weights: their results have 8 bits.
    """
    torch.manual_seed(0)
    weight, x = torch.randn(384, 320).bfloat16(), torch.randn(50, 320).bfloat16()
    on_cuda, on_cpu = in_few_bits(base, weight.cuda()), in_few_bits(base, weight)
    found, expected = on_cuda.whole(), on_cpu.whole()
    assert found.is_cuda and found.dtype == expected.dtype == torch.bfloat16
    differing = found.cpu() != expected
    assert differing.float().mean() < {"nf4": 1e-3, "8bit": 5e-3}[base]
    largest = weight.abs().float().flatten().unflatten(0, (-1, 64)).amax(1).repeat_interleave(64).view_as(weight)
    step = {"nf4": 0.31, "8bit": 0.02}[base]  # the widest between two levels, of those from -1 to 1
    assert ((found.cpu() - expected).float().abs() <= step * largest).all()
    # Levels are rounded to bfloat16, and a CPU looks for them with 14 bits.
    unequally_near = ((found.cpu() - weight).float().abs() - (expected - weight).float().abs()).abs()
    assert (unequally_near <= 2**-6 * weight.abs().float() + 2**-14 * largest).all()
    whole = nn.Linear(320, 384, bias=False)
    whole.weight = nn.Parameter(found.cpu().float())
    for one, other in zip(product_and_slope(on_cuda, x.cuda()), product_and_slope(whole, x.float()), strict=True):
        assert (one - other).norm() < 2**-7 * other.norm()


@FEW_BITS
@needs_bits
@BASES
def test_a_base_in_few_bits_takes_the_memory_that_the_planner_says(tmp_path: Path, base: QuantizedBase) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "num_hidden_layers": 4}
    path = save_qwen3(tmp_path, **sizes)
    cfg = ModelConfig(path=path, compute_dtype="bfloat16")
    config = load_model_config(cfg)
    held, planned, quantized = {}, {}, {}
    for kind in (None, base):
        lora = LoraConfig(rank=4, base=kind)
        with spmd_session(threads_per_rank=1, deterministic=False) as world:
            before = allocated()
            policy = load_trained(cfg, lora, build_meshes(world), temperature=1.0, seed=0)
            held[kind] = allocated() - before
            layers = [layer for layer in policy.modules() if isinstance(layer, QuantizedLinear)]
            quantized[kind] = sum(layer.weight.numel() for layer in layers)
            stored = [x for numbers, state in (layer.stored for layer in layers) for x in (numbers, state.absmax)]
            assert all(x.is_cuda for x in stored)
            del policy, layers, stored
        size = Model.read(config, cfg, lora=lora).size(ParallelConfig(), num_training=1)
        planned[kind] = training_memory(cfg, OptimConfig(lr=1e-5), [size], compute_bytes=2).weights
    assert quantized[None] == 0
    # To a hundredth: small buffers, and blocks of torch's allocator, are not in the plan.
    for kind in (None, base):
        assert held[kind] == pytest.approx(planned[kind], rel=0.01)
    saved = 2 * quantized[base] - bytes_of(quantized[base], base)
    assert held[None] - held[base] == pytest.approx(saved, rel=0.01)
