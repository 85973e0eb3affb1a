"""What each level of checkpointing computes again, and that it changes no gradient."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from spmdrl.memory.activations import ActivationSettings, activation_bytes
from spmdrl.memory.phases import _SCORE
from spmdrl.model.lora.layers import ExpertsTarget, LinearTarget, Pair
from spmdrl.model.policy import Policy
from spmdrl.model.routes import Routers
from spmdrl.preflight.forecast import decoder_of
from spmdrl.types import MicroBatch
from tests.helpers import kernels_on_cpu
from tests.helpers.live import Watch
from tests.helpers.policies import policy_of, tokens

TINY = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@dataclass(frozen=True, slots=True)
class Computed:
    """One forward and backward pass."""

    gradients: list[Tensor]
    operations: Counter[str]  # of both
    kept_bytes: int  # at the end of the forward pass


def computed(policy: Policy, batch: MicroBatch) -> Computed:
    with Watch() as watch:
        scores = policy(batch)
        kept = watch.live_bytes
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    return Computed([p.grad for p in policy.parameters() if p.requires_grad], watch.operations, kept)


# 300 tokens are tiles and a rest to the linear layers of a CPU; 40 are too few for tiles.
@pytest.mark.parametrize(
    ("model", "seqlens", "dtype"),
    [
        ("tiny", (100, 100, 60, 40), torch.float32),
        ("tiny", (20, 20), torch.float32),
        ("tiny", (100, 28), torch.bfloat16),
        ("experts", (100, 28), torch.float32),
    ],
)
def test_levels_differ_in_what_runs_twice_and_in_nothing_else(
    model: str, seqlens: tuple[int, ...], dtype: torch.dtype
) -> None:
    batch = tokens(*seqlens)
    none = computed(policy_of("none", dtype=dtype, **MODELS[model]), batch)
    for level, every_layers in (("full", 1), ("full", 2), ("selective", 1), ("selective", 3)):
        other = computed(policy_of(level, every_layers=every_layers, dtype=dtype, **MODELS[model]), batch)
        assert all(torch.equal(one, two) for one, two in zip(none.gradients, other.gradients, strict=True))
        again = other.operations - none.operations
        assert again["aten::rsqrt"] > 0, "norms are computed again"
        products = {name for name in again if any(word in name for word in ("mm", "linear", "attention"))}
        assert bool(products) == (level == "full"), (level, products)


def test_less_is_kept_the_more_is_computed_again() -> None:
    batch = tokens(100, 28)
    kept = {
        (level, every_layers): computed(policy_of(level, every_layers=every_layers, **TINY), batch).kept_bytes
        for level, every_layers in (("none", 1), ("selective", 2), ("selective", 1), ("full", 2), ("full", 1))
    }
    assert kept["full", 1] < kept["selective", 1] < kept["selective", 2] < kept["none", 1]
    assert kept["full", 1] < 0.12 * kept["none", 1]
    assert kept["full", 1] < kept["full", 2] < kept["none", 1]


@pytest.mark.parametrize("model", ["tiny", "experts"])
def test_products_of_adapters_are_computed_again(model: str) -> None:
    """With adapters, "selective" keeps little more than without: what A makes, and not what B makes of that."""
    batch = tokens(100, 28)
    none, selective = (computed(adapted(policy_of(level, **MODELS[model])), batch) for level in ("none", "selective"))
    assert all(torch.equal(one, two) for one, two in zip(none.gradients, selective.gradients, strict=True))
    plain = computed(policy_of("selective", **MODELS[model]), batch)
    assert selective.kept_bytes < 1.1 * plain.kept_bytes


def adapted(policy: Policy) -> Policy:
    """Give every linear layer, and all experts, adapters of rank 2, which become the policy's only parameters."""
    pairs = nn.ParameterList()
    for name, module in policy.requires_grad_(False).model.named_modules():
        is_layer = isinstance(module, nn.Linear) and "lm_head" not in name
        targets = [LinearTarget(name, module, F.linear)] if is_layer else []
        if hasattr(module, "gate_up_proj"):
            targets += [ExpertsTarget(name, f"{name}.{own}", module) for own in ("gate_up_proj", "down_proj")]
        for target in targets:
            matrices = [nn.Parameter(torch.randn(shape)) for shape in target.shapes(2)]
            pairs.extend(matrices)
            target.install(Pair(*matrices), scale=1.0, is_on=lambda: True)
    policy.adapters = pairs
    return policy


def test_products_that_biases_of_experts_change_are_computed_again() -> None:
    batch = tokens(20, 20)
    sizes = TINY | {"num_local_experts": 4, "num_experts_per_tok": 2, "kind": GptOssConfig}
    none, selective = (computed(policy_of(level, **sizes), batch) for level in ("none", "selective"))
    assert all(torch.equal(one, two) for one, two in zip(none.gradients, selective.gradients, strict=True))
    assert selective.kept_bytes < none.kept_bytes


MEDIUM = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "medium": MEDIUM | {"head_dim": 64},
    "llama": TINY | {"kind": LlamaConfig},
    "experts": TINY | EXPERTS | {"hidden_size": 128, "head_dim": 32, "kind": Qwen3MoeConfig},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_kept_is_what_the_formula_says(model: str, dtype: torch.dtype) -> None:
    seqlens = (100, 60, 40)  # runs of several lengths, whose results SDPA's caller has to join
    for level, every_layers in (("none", 1), ("full", 1), ("selective", 1), ("full", 2), ("selective", 3)):
        policy = policy_of(level, every_layers=every_layers, dtype=dtype, **MODELS[model])
        with Watch() as watch:
            scores = policy(tokens(*seqlens))
            measured = watch.live_bytes
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
        kept = ActivationSettings(
            level=level, every_layers=every_layers, compute_bytes=dtype.itemsize, repeats_keys=False
        )
        predicted = activation_bytes(decoder_of(policy.model.config, shapes), kept, num_tokens=sum(seqlens))
        assert 0.85 < predicted / measured < 1.15, (level, every_layers)
        del scores


def test_a_loss_of_balance_takes_less_than_the_planner_says() -> None:
    for level in ("none", "full"):
        policy = policy_of(level, **MODELS["experts"] | {"num_experts": 64})
        policy.routers, kept = Routers(policy.model), []
        for _ in range(2):
            with Watch() as watch:
                scores = policy(tokens(100, 60, 40))
                kept.append(watch.live_bytes)
            del scores
            policy.routers.watch_scores()
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
        predicted = 200 * decoder_of(policy.model.config, shapes).router_width * _SCORE
        assert policy.routers.num_layers * 64 == decoder_of(policy.model.config, shapes).router_width
        assert predicted / 3 < kept[1] - kept[0] < predicted


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WIDE = HEADS | {"hidden_size": 128, "intermediate_size": 256}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_expand": 2}
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
HYBRIDS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "kind": NemotronHConfig,
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
    },
    "granite": ALTERNATING
    | MAMBA2
    | {"kind": GraniteMoeHybridConfig, "num_local_experts": 0, "shared_intermediate_size": 256},
    "lfm2": {"kind": Lfm2Config, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "qwen3_5": ALTERNATING
    | {"kind": Qwen3_5TextConfig, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}


SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 60}
SOME_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
GEMMA4 = SLIDING | {
    "kind": Gemma4TextConfig,
    "global_head_dim": 64,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 0,
}
# Norms that apply their weights in float32, heads of two sizes, keys for other layers, an MLP beside experts, latents.
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": SLIDING | {"kind": Gemma2Config},
    "gemma3": SLIDING | {"kind": Gemma3TextConfig},
    "gemma4": GEMMA4,
    "gemma4 with experts": GEMMA4 | SOME_EXPERTS | {"enable_moe_block": True, "top_k_experts": 2},
    "gemma4 with inputs of layers": GEMMA4
    | {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    "qwen2_moe": SOME_EXPERTS | {"kind": Qwen2MoeConfig, "shared_expert_intermediate_size": 256},
    "deepseek_v3": SOME_EXPERTS
    | LATENT
    | {"kind": DeepseekV3Config, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 1, "num_key_value_heads": 4, "head_dim": 16},
}
MOST = {"gemma4 with inputs of layers": 1.2}  # its layers without keys of their own are counted as if they had some


# Two kinds of recurrent layers, windows with experts, and latents.
IN_THE_GATE = ("qwen3_5", "nemotron_h", "gemma4 with experts", "deepseek_v3")


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name in IN_THE_GATE else pytest.mark.slow) for name in HYBRIDS | OTHERS]
)
def test_what_layers_of_several_kinds_keep_is_what_the_formula_says(model: str) -> None:
    for dtype, level in itertools.product((torch.float32, torch.bfloat16), ("none", "full", "selective")):
        policy = policy_of(level, dtype=dtype, **WIDE | (HYBRIDS | OTHERS)[model])
        with Watch() as watch:
            scores = policy(tokens(100, 60, 40))
            measured = watch.live_bytes
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
        kept = ActivationSettings(level=level, every_layers=1, compute_bytes=dtype.itemsize, repeats_keys=False)
        predicted = activation_bytes(decoder_of(policy.model.config, shapes), kept, num_tokens=200)
        assert 0.85 < predicted / measured < MOST.get(model, 1.15), (dtype, level, predicted / measured)
        del scores


def test_what_is_kept_with_a_float32_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that computes as SGLang does under `rl_on_policy_target`."""
    kernels_on_cpu.use(monkeypatch)
    for level in ("none", "full"):
        policy = policy_of(level, dtype=torch.bfloat16, kernel="sglang_triton", **MODELS["medium"])
        with Watch() as watch:
            scores = policy(tokens(100, 60, 40))
            measured = watch.live_bytes
        shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
        kept = ActivationSettings(level=level, every_layers=1, compute_bytes=2, repeats_keys=False, wide_stream=True)
        predicted = activation_bytes(decoder_of(policy.model.config, shapes), kept, num_tokens=200)
        assert 0.85 < predicted / measured < 1.25, (level, predicted / measured)
        del scores
