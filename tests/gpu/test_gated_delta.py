"""Gated delta nets on a CUDA device: what the CPU computes in float32, within the dtype's precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from spmdrl.model import gated_delta_cuda
from spmdrl.model.layers import set_classes
from spmdrl.model.recurrent import packed_layers

SEQLENS = [1, 3, 64, 17, 300, 3, 130]
HIDDEN = 256


def packed_layer() -> nn.Module:
    """On the CPU, with the head sizes of published models and numbers that bfloat16 has."""
    torch.manual_seed(0)
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = Qwen3NextConfig(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["linear_attention"], **heads)
    layer = Qwen3NextGatedDeltaNet(config, 0).bfloat16().float()
    set_classes(packed_layers(layer))
    return layer


def with_gradients(layer: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    leaf = hidden.clone().requires_grad_()
    out = layer(leaf, seqlens=SEQLENS)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out.float() * slope.to(out.device)).sum().backward()
    assert leaf.grad is not None
    found = {"output": out, "input": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return {name: x.detach().float().cpu() for name, x in found.items()}


def require_near_the_cpu(dtype: torch.dtype, limit: float) -> None:
    layer = packed_layer()
    hidden = torch.randn(1, sum(SEQLENS), HIDDEN).bfloat16().float()
    expected = with_gradients(layer, hidden)
    found = with_gradients(copy.deepcopy(layer).to("cuda", dtype), hidden.to("cuda", dtype))
    for name, wanted in expected.items():
        assert (found[name] - wanted).norm() < limit * wanted.norm(), name


@pytest.mark.claim("Attention and models", "Gated delta nets on packed sequences equal the CPU, by plain products.")
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_plain_products_equal_the_cpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, limit: float) -> None:
    for name in ("has_rule", "has_conv"):
        monkeypatch.setattr(gated_delta_cuda, name, lambda *_: False)
    require_near_the_cpu(dtype, limit)


@pytest.mark.claim(
    "Attention and models",
    "Gated delta nets on packed sequences equal the CPU, by the kernels of flash-linear-attention and causal-conv1d.",
)
@pytest.mark.parametrize("packages", [("fla",), ("fla", "causal_conv1d")], ids="+".join)
def test_the_packages_kernels_equal_the_cpu(packages: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in packages:
        pytest.importorskip(package)
    if gated_delta_cuda._is_refused():
        pytest.skip("flash-linear-attention refuses this version of Triton on Hopper")
    assert gated_delta_cuda.has_rule("cuda", torch.bfloat16)
    if "causal_conv1d" in packages:
        assert gated_delta_cuda.has_conv("cuda", torch.zeros(8, 4), "silu")
    else:
        monkeypatch.setattr(gated_delta_cuda, "has_conv", lambda *_: False)
    require_near_the_cpu(torch.bfloat16, 0.05)
