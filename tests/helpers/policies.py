"""Policies without a process group, and what their forward pass reads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from spmdrl.model.kernels import Kernel
from spmdrl.model.layers import replace_layers
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy
from spmdrl.model.sharding import checkpoint_layers, decoder_layers
from spmdrl.types import MicroBatch


def tokens(*seqlens: int) -> MicroBatch:
    """Sequences of these lengths, of which all but the first ten tokens are predicted."""
    positions = torch.cat([torch.arange(length) for length in seqlens])
    per_token, per_rollout = torch.zeros(len(positions)), torch.zeros(len(positions), dtype=torch.float64)
    return MicroBatch(
        token_ids=torch.arange(len(positions)) % 90 + 2,
        positions=positions,
        cu_seqlens=torch.tensor([0, *seqlens]).cumsum(0).int(),
        loss_mask=positions > 9,
        loss_weights=per_token,
        rollout_logprobs=per_token,
        rewards=per_rollout,
        baseline_rewards=per_rollout,
    )


def policy_of(
    level: str,
    *,
    every_layers: int = 1,
    dtype: torch.dtype = torch.float32,
    kind: type[PreTrainedConfig] = Qwen3Config,
    kernel: Kernel = "sdpa",
    **sizes: Any,
) -> Policy:
    torch.manual_seed(0)
    settings = {"vocab_size": 97, "num_hidden_layers": 4, "tie_word_embeddings": True} | sizes
    model = AutoModelForCausalLM.from_config(kind(**settings), attn_implementation="spmdrl").to(dtype).eval()
    replace_layers(model, operators_of(kernel))
    if level != "none":
        checkpoint_layers(model, decoder_layers(model), recomputed=level, every_layers=every_layers)
    return Policy(model, kernel=kernel, temperature=1.0, logits_chunk_tokens=64)
