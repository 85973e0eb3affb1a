"""What a model cannot be split into is said in one sentence, with the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)
from transformers.distributed.mixin import DistributedMixin

from spmdrl.config import ParallelConfig
from spmdrl.model.experts import joining_experts
from spmdrl.model.layers import set_classes
from spmdrl.model.load import load_model_config, parallel_model_problems
from spmdrl.model.split import split_problems
from tests.helpers.configs import model_config
from tests.helpers.models import config_of, needs_expert_plans, save_qwen3

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "pad_token_id": None,
}
LLAMA = LlamaConfig(**SMALL, num_key_value_heads=2, intermediate_size=100)
MOE = Qwen3MoeConfig(**SMALL, num_key_value_heads=4, head_dim=8, num_experts=6, moe_intermediate_size=20)


def problems(config: PreTrainedConfig, **sizes: int) -> list[str]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return list(split_problems(model, **({"tp": 1, "ep": 1} | sizes)))


@pytest.mark.parametrize(
    "config, sizes",
    [
        pytest.param(LLAMA, {}, id="whole"),
        pytest.param(LLAMA, {"tp": 2}, id="tp 2"),
        pytest.param(MOE, {"tp": 4, "ep": 3}, id="tp 4, ep 3", marks=needs_expert_plans),
        pytest.param(MOE, {"ep": 6}, id="ep 6", marks=needs_expert_plans),
    ],
)
def test_what_can_be_split_has_no_problems(config: PreTrainedConfig, sizes: dict[str, int]) -> None:
    assert problems(config, **sizes) == []


def test_a_transformers_without_plans_for_experts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DistributedMixin, "ep_plan", raising=False)
    assert problems(MOE, tp=4) == []
    (sentence,) = problems(MOE, ep=2)
    assert sentence.startswith(f"parallel.ep = 2, but transformers {transformers.__version__} has no plans")
    assert sentence.endswith("install 5.19 or newer, or set ep = 1")


def test_everything_that_tp_does_not_divide_is_named_with_what_would() -> None:
    (sentence,) = problems(LLAMA, tp=8)
    assert "parallel.tp = 8 does not divide" in sentence
    assert "the 2 heads of model.layers.*.self_attn.k_proj" in sentence
    assert "the 100 outputs of model.layers.*.mlp.gate_proj" in sentence
    assert "q_proj" not in sentence  # it has 8 heads
    assert sentence.endswith("possible: 1, 2")


def test_half_of_packed_outputs_is_what_counts() -> None:
    (sentence,) = problems(MOE, tp=8)
    assert "the 20 outputs of each half of model.layers.*.mlp.experts.gate_up_proj" in sentence
    assert "the 20 inputs of model.layers.*.mlp.experts.down_proj" in sentence


@needs_expert_plans
def test_experts_are_dealt_evenly() -> None:
    (sentence,) = problems(MOE, ep=4)
    assert "parallel.ep = 4 does not divide the 6 experts of" in sentence
    assert sentence.endswith("possible: 1, 2, 3, 6")


@needs_expert_plans
def test_a_model_without_a_plan_is_refused() -> None:
    (without_tp,) = problems(OPTConfig(**SMALL), tp=2)
    assert "no tp plan for OPTForCausalLM" in without_tp and "set tp = 1" in without_tp
    (without_ep,) = problems(LLAMA, ep=2)
    assert "no ep plan for LlamaForCausalLM" in without_ep and "set ep = 1" in without_ep


def test_a_style_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LlamaConfig.base_model_tp_plan, "layers.*.self_attn.o_proj", "of_next_year")
    (sentence,) = problems(LLAMA, tp=2)
    assert (
        'LlamaForCausalLM needs "of_next_year" for model.layers.*.self_attn.o_proj, which is not supported' in sentence
    )


def test_heads_of_latent_attention_are_dealt_whole() -> None:
    sizes = {"moe_intermediate_size": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32}
    config = DeepseekV2Config(**SMALL, **sizes, intermediate_size=64, n_routed_experts=4, q_lora_rank=None)
    assert problems(config, tp=2) == []
    (sentence,) = problems(config, tp=16)
    assert "the 8 heads of model.layers.*.self_attn.q_proj" in sentence
    assert "the 8 heads of model.layers.*.self_attn.kv_b_proj" in sentence


def test_the_directory_is_asked_before_anything_is_loaded(tmp_path: Path) -> None:
    cfg = model_config(save_qwen3(tmp_path))
    (sentence,) = parallel_model_problems(load_model_config(cfg), cfg, ParallelConfig(tp=2))
    assert "the 97 tokens of the vocabulary" in sentence


def test_linear_layers_that_compute_otherwise_are_not_split() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = AutoModelForCausalLM.from_config(LLAMA)
    model.model.layers[1].mlp.up_proj.__class__ = Scaled
    (sentence,) = split_problems(model, tp=2, ep=1)
    assert '"colwise" for model.layers.*.mlp.up_proj' in sentence


def test_experts_that_no_token_takes_have_gradients_of_zero() -> None:
    """As a rank needs them, whose tokens all go to experts that compute nothing."""
    model = AutoModelForCausalLM.from_config(config_of("longcat_flash"))
    (first, *_) = made = [module for module, _ in joining_experts(model)]
    assert len(made) == len(model.model.layers)
    set_classes(joining_experts(model))
    tokens, nothing = torch.randn(3, 32), torch.tensor([[4, 5], [6, 7], [5, 4]])
    found = first(tokens, nothing, torch.full((3, 2), 0.5))
    torch.testing.assert_close(found, tokens)
    found.sum().backward()
    for weight in (first.gate_up_proj, first.down_proj):
        assert weight.grad is not None and not weight.grad.any()
