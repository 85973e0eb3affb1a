"""Tiny models, tokenizers and sequences that tests build on the spot."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from spmdrl.config import LossConfig, ModelConfig
from spmdrl.config.plan import Plan
from spmdrl.dist.mesh import Meshes
from spmdrl.model.policy import Policy
from spmdrl.step.batch import Batch
from spmdrl.step.logprobs import Forward, add_columns
from spmdrl.types import Sequence

VOCABULARY = 97  # odd, so that no number of ranks divides it


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


def random_sequences(
    count: int, *, seed: int = 0, max_tokens: int = 40, vocabulary: int = VOCABULARY
) -> list[Sequence]:
    """Prompt and response of random lengths, with log-probabilities and rewards of a plausible size."""
    rng = random.Random(seed)
    sequences = []
    for index in range(count):
        prompt, response = rng.randint(1, 8), rng.randint(1, max_tokens - 8)
        sequences.append(
            Sequence(
                index=index,
                token_ids=tuple(rng.randrange(2, vocabulary) for _ in range(prompt + response)),
                loss_mask=(False,) * prompt + (True,) * response,
                rollout_logprobs=(0.0,) * prompt + tuple(-3 - rng.random() for _ in range(response)),
                reward=rng.uniform(-2, 2),
            )
        )
    return sequences


def completed(batch: Batch, meshes: Meshes, policy: Policy | None = None, reference: Policy | None = None) -> Batch:
    """The batch as a loss takes it: rewards are its advantages, and log-probabilities those of the models given."""
    forwards: dict[str, Forward] = {"advantages": lambda micro_batch: micro_batch.rewards.float()}
    if policy is not None and len(batch.mini_batches) > 1:
        forwards["old_logprobs"] = lambda micro_batch: policy(micro_batch).logprobs
    if reference is not None:
        forwards["ref_logprobs"] = lambda micro_batch: reference(micro_batch).logprobs
    return add_columns(batch, forwards, meshes.training)


def plan_for(num_sequences: int, num_ranks: int, **changes: Any) -> Plan:
    """A plan with one update on all sequences and a token budget that gives several micro-batches."""
    settings: dict[str, Any] = {
        "num_ranks": num_ranks,
        "num_steps": 1,
        "prompts_per_step": num_sequences,
        "prompts_per_rank": num_sequences // num_ranks,
        "rollouts_per_step": num_sequences,
        "updates_per_step": 1,
        "num_updates": 1,
        "rollouts_per_mini_batch": num_sequences,
        "max_sequence_tokens": 40,
        "max_response_tokens": 32,
        "max_tokens_per_micro_batch": 64,
        "sequences_per_micro_batch": None,
        "max_micro_batches_per_update": num_sequences,
        "max_eval_sequence_tokens": 0,
        "eval_prompts": 0,
        "eval_every": 0,
        "checkpoint_every": 0,
        "export_every": 0,
    }
    return Plan(**(settings | changes))


def model_config(path: str, **changes: Any) -> ModelConfig:
    """Settings for a tiny model; a head chunk small enough to be used several times."""
    return ModelConfig(path=path, **({"logits_chunk_tokens": 16} | changes))


def loss_config(**changes: Any) -> LossConfig:
    """The default loss with some changes."""
    return LossConfig(**changes)
