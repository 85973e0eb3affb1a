"""Tiny models that tests build on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.distributed.mixin import DistributedMixin

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


def save_model(path: Path, config: PreTrainedConfig, *, seed: int = 0) -> str:
    """A random model of that config in which no parameter is all zeros or ones; returns its directory."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
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
_FIRST_DENSE = _ROUTED | {"first_k_dense_replace": 1}
_PLAIN = """
    apertus arcee ernie4_5 gemma glm4 granite hunyuan_v1_dense ministral olmo olmo2 phi phi3 seed_oss smollm3 starcoder2
"""
# Families without a test of their own, and what their configs call experts and windows.
OTHERS: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN.split()},
    "cohere2": SLIDING | {"logit_scale": 1.0},
    "dots1": _FIRST_DENSE,
    "ernie4_5_moe": {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 0},
    "exaone4": SLIDING,
    "flex_olmo": EXPERTS,
    "glm4_moe": _FIRST_DENSE,
    "granitemoe": EXPERTS | {"num_local_experts": 5},
    "hunyuan_v1_moe": EXPERTS | {"moe_topk": 2},
    "minimax_m2": EXPERTS | {"num_local_experts": 5},
    "mixtral": EXPERTS | {"num_local_experts": 5},
    "olmo3": SLIDING,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
}


def save_other(model_type: str, path: Path, *, seed: int = 0) -> str:
    """A random model of one of the `OTHERS`."""
    return save_model(path, AutoConfig.for_model(model_type, **(SIZES | OTHERS[model_type])), seed=seed)


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
