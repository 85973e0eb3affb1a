"""Settings, plans and whole configurations that a test changes in one place."""

from __future__ import annotations

from typing import Any

from spmdrl.config import Config, LossConfig, ModelConfig
from spmdrl.config.plan import Plan


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


def minimal_config(**sections: dict[str, Any]) -> Config:
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": "x", "num_steps": 1},
        "model": {"path": "m"},
        "data": {"sources": [{"kind": "jsonl", "path": "a"}], "max_prompt_tokens": 8},
        "rollout": {"prompts_per_step": 8, "group_size": 2, "max_response_tokens": 8},
        "reward": {"terms": [{"kind": "exact"}]},
        "optim": {"lr": 1e-3},
        "pack": {"max_tokens_per_micro_batch": 64},
    }
    return Config.model_validate({k: settings.get(k, {}) | sections.get(k, {}) for k in settings | sections})
