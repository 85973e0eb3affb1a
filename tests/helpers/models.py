"""Tiny models that tests build on the spot."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.distributed.mixin import DistributedMixin

from spmdrl.model.trunk import model_class

# transformers before 5.19 cannot send tokens to the experts of other ranks, and `parallel.ep` is refused.
HAS_EXPERT_PLANS = hasattr(DistributedMixin, "ep_plan")
needs_expert_plans = pytest.mark.skipif(not HAS_EXPERT_PLANS, reason="this transformers has no plans for experts")

VOCABULARY = 97  # odd, so that no number of ranks divides it
QWEN3 = Qwen3Config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
    dtype="bfloat16",
)


# Of Phi-4-mini, for the 96 dimensions of a head that are rotated; its short ones are all 1, up to 4,096 tokens.
# fmt: off
LONG_FACTORS = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555,
    7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283,
    20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7,
    32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]
# fmt: on


def longrope(limit: int, num_factors: int = 48, **changes: Any) -> dict[str, Any]:
    """Rotary settings as Phi-4-mini's: sequences of more than `limit` tokens have other frequencies."""
    long = LONG_FACTORS[:: 48 // num_factors][:num_factors]
    factors = {"short_factor": [1.0] * num_factors, "long_factor": long}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": limit}
    return {"rope_parameters": rope | factors | changes}


def save_model(path: Path, config: PreTrainedConfig, *, seed: int = 0) -> str:
    """A random model of that config in which no parameter is all zeros or ones; returns its directory."""
    torch.manual_seed(seed)
    model = model_class(config).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.std() == 0:  # else it would not matter how often a bias is added
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return str(path)


def save_qwen3(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Qwen3 with grouped heads; returns its directory."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return save_model(path, Qwen3Config(**(settings | changes)), seed=seed)


def save_llama(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Llama with untied embeddings; returns its directory."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    return save_model(path, LlamaConfig(**(settings | changes)), seed=seed)


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
GATED_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


_ROUTED = EXPERTS | {"n_routed_experts": 5, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_ALL_NAMES = _ROUTED | {"num_local_experts": 5}
_FIRST_DENSE = _ROUTED | {"first_k_dense_replace": 1}
_PLAIN = "apertus arcee ernie4_5 gemma glm glm4 hunyuan_v1_dense jais2 ministral ministral3 olmo olmo2 phi seed_oss"
_PLAIN += " smollm3 starcoder2"
# Of Granite 3.1 8B, as released.
_GRANITE = {
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 16.0,
    "residual_multiplier": 0.22,
}
# Mamba 2 as most families call its sizes; dense Granite 4 has no experts, and no rotary embeddings.
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
_GRANITE_HYBRID = _MAMBA2 | {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_intermediate_size": 40,
    "position_embedding_type": None,
}
# Of Falcon-H1 0.5B, as released.
_FALCON_H1 = {
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375,
    "embedding_multiplier": 5.656854249492381,
    "key_multiplier": 0.390625,
    "lm_head_multiplier": 0.0390625,
    "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": False,
    "mamba_d_ssm": 48,
}
_NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 5,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}
# Of Gemma 4, as released: heads of two sizes, layers that share keys and values, inputs of each layer's own.
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "sliding_window": 6,
    "head_dim": 8,
    "global_head_dim": 16,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
# Of latent attention: YaRN as DeepSeek's, and queries with a rank of their own.
_LATENT = _ROUTED | {
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "head_dim": 4,  # that of the rotary embedding
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
}
# Families without a test of their own, and what their configs call experts and windows.
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN.split()},
    "afmoe": _ALL_NAMES | SLIDING,
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.0625, "head_dim": 8},  # SGLang takes the size of heads from the width
    "cohere2": SLIDING | {"logit_scale": 0.25},
    "cohere2_moe": _ALL_NAMES | SLIDING | {"logit_scale": 0.25},
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "dots1": _FIRST_DENSE,
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    "exaone4": SLIDING,
    "exaone_moe": _ALL_NAMES | SLIDING,
    "falcon_h1": _MAMBA2 | _FALCON_H1 | {"head_dim": 8},
    "flex_olmo": EXPERTS,
    # As released, but for its cap of scores, which small random weights would not reach.
    "gemma2": SLIDING | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0},
    "gemma4_text": _GEMMA4,
    # Of 26B-A4B: experts, and keys that are values in layers with fewer of them.
    "gemma4_text with experts": _GEMMA4
    | EXPERTS
    | {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    },
    "glm4_moe": _FIRST_DENSE,
    "glm4_moe_lite": _LATENT,
    "granite": _GRANITE,
    "granitemoe": _GRANITE | EXPERTS | {"num_local_experts": 5},
    "granitemoehybrid": _GRANITE | _GRANITE_HYBRID | {"num_local_experts": 5},
    "granitemoehybrid without experts": _GRANITE
    | _GRANITE_HYBRID
    | {"num_local_experts": 0, "position_embedding_type": "rope"},
    "granitemoeshared": _GRANITE | _ALL_NAMES | {"shared_intermediate_size": 24},
    "helium": {"head_dim": 8},
    "hy_v3": _ALL_NAMES,
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2},
    "laguna": _ALL_NAMES | SLIDING,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "head_dim": 8},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "head_dim": 8},
    # Experts of which half compute nothing, and two attentions in a layer.
    "longcat_flash": _LATENT
    | {"num_hidden_layers": 4, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "n_routed_experts": 4}
    | {"zero_expert_num": 4, "moe_topk": 2},
    "mimo_v2_flash": _ALL_NAMES | SLIDING | {"head_dim": 24, "v_head_dim": 16},
    "minicpm3": _LATENT | {"dim_model_base": 16},
    "minimax_m2": EXPERTS | {"num_local_experts": 5},
    # Queries are scaled by the place of their token.
    "mistral4": _LATENT
    | {"head_dim": 12, "rope_parameters": _LATENT["rope_parameters"] | {"llama_4_scaling_beta": 0.1}},
    "mixtral": EXPERTS | {"num_local_experts": 5},
    "nanochat": {"final_logit_softcapping": 15.0},
    # Nemotron 3 Super and Ultra have experts that work on narrower inputs.
    "nemotron_h": _NEMOTRON_H | {"moe_latent_size": 16},
    "olmo3": SLIDING,
    "phi3": longrope(20, num_factors=4) | {"head_dim": 8, "original_max_position_embeddings": 20},
    "solar_open": _ALL_NAMES,
    "vaultgemma": SLIDING | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0},
    "youtu": _LATENT,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
}


def save_other(name: str, path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random model of one of the `OTHERS`."""
    return save_model(path, config_of(name, **changes), seed=seed)


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of one of the `OTHERS`, whose names begin with the model's type."""
    settings = copy.deepcopy(SIZES | OTHERS[name] | changes)  # some configs change what they are given
    config: PreTrainedConfig = AutoConfig.for_model(name.split()[0], **settings)
    return config


def save_qwen2(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Qwen2, whose projections of queries, keys and values have biases."""
    settings = {name: value for name, value in SIZES.items() if name != "head_dim"}  # it has no such setting
    return save_model(path, Qwen2Config(**(settings | changes)), seed=seed)


def save_mistral(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Mistral whose heads have a size of their own, as those of Mistral Nemo."""
    return save_model(path, MistralConfig(**(SIZES | changes)), seed=seed)


def save_gemma3(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Gemma 3 text model: a sliding and a full layer, and scores scaled by something else than the head."""
    settings = SIZES | SLIDING | {"query_pre_attn_scalar": 24} | changes
    return save_model(path, Gemma3TextConfig(**settings), seed=seed)


def save_qwen3_moe(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Qwen3 with experts in every layer."""
    return save_model(path, Qwen3MoeConfig(**(SIZES | EXPERTS | changes)), seed=seed)


def save_phi3(path: Path, *, limit: int, seed: int = 0, **changes: Any) -> str:
    """A random Phi-3 with rotary settings as Phi-4-mini's, in three quarters of each head."""
    rope = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": limit} | longrope(limit, num_factors=6)
    return save_model(path, Phi3Config(**(SIZES | {"hidden_size": 64} | rope | changes)), seed=seed)


def save_gpt_oss(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random gpt-oss: attention sinks, a sliding and a full layer, experts with biases, YaRN positions."""
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
    settings = {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "rope_parameters": rope | {"truncate": False, "original_max_position_embeddings": 32},
    }
    return save_model(path, GptOssConfig(**(SIZES | SLIDING | settings | changes)), seed=seed)


def save_qwen3_next(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Qwen3-Next: a gated delta net, a gated attention, experts in both layers."""
    settings = SIZES | EXPERTS | GATED_DELTA_NET | {"shared_expert_intermediate_size": 24}
    return save_model(path, Qwen3NextConfig(**(settings | changes)), seed=seed)


def save_qwen3_5(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Qwen3.5 text model: a gated delta net and a gated attention."""
    return save_model(path, Qwen3_5TextConfig(**(SIZES | GATED_DELTA_NET | changes)), seed=seed)


def save_qwen3_5_moe(path: Path, *, seed: int = 0, **changes: Any) -> str:
    """A random Qwen3.5 text model with experts, one of them shared, in both layers."""
    settings = SIZES | EXPERTS | GATED_DELTA_NET | {"shared_expert_intermediate_size": 24}
    return save_model(path, Qwen3_5MoeTextConfig(**(settings | changes)), seed=seed)
