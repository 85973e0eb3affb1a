"""Policies without a process group, and what their forward pass reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from spmdrl.model.checkpointing import checkpoint_layers
from spmdrl.model.kernels import Kernel
from spmdrl.model.load import decoder_layers
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy
from spmdrl.types import ImageSpan


@dataclass(frozen=True, slots=True)
class Tokens:
    """The columns of a micro-batch that a policy's forward reads."""

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    seqlens: list[int]
    loss_mask: Tensor
    images: tuple[ImageSpan, ...] = ()

    @property
    def predicted(self) -> Tensor:
        """The tokens whose log-probabilities are computed."""
        return self.loss_mask


def tokens(*seqlens: int) -> Tokens:
    positions = torch.cat([torch.arange(length) for length in seqlens])
    ends = torch.tensor([0, *seqlens]).cumsum(0)
    return Tokens(torch.arange(len(positions)) % 90 + 2, positions, ends.int(), list(seqlens), positions > 9)


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
    operators_of(kernel).install(model)
    if level != "none":
        checkpoint_layers(model, decoder_layers(model), recomputed=level, every_layers=every_layers)
    return Policy(model, kernel=kernel, temperature=1.0, logits_chunk_tokens=64)
