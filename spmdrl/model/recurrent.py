"""Layers that carry a state from token to token, started afresh at every packed sequence.

A gated delta net of transformers takes [batch, tokens] and starts with an empty state in each row of the batch. Whoever
calls a packed model passes `seqlens`, and each run of sequences of equal length becomes such a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.kernels import runs_of_equal_length

_MIXERS = {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"}


class _RestartsAtEverySequence(nn.Module):
    def forward(
        self,
        hidden_states: Tensor,
        *,
        seqlens: list[int] | None = None,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """hidden_states is [1, T, D], as is the result."""
        assert seqlens is not None, "this layer has a state: its caller must say where sequences begin"
        assert cache_params is None and attention_mask is None, "packed sequences have no cache and no padding"
        outputs = [
            # The others are for attention; the kernels that this module may use do not know them.
            super(_RestartsAtEverySequence, self)
            .forward(hidden_states[0, tokens].unflatten(0, (count, length)))
            .flatten(0, 1)
            for tokens, count, length in runs_of_equal_length(seqlens)
        ]
        return torch.cat(outputs).unsqueeze(0)


def restart_at_every_sequence(model: nn.Module) -> None:
    """Let the model's recurrent layers obey `seqlens`. Call it before the model is sharded."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _MIXERS:
            module.__class__ = type(kind.__name__, (_RestartsAtEverySequence, kind), {"__module__": kind.__module__})


def restartable_layers(model: nn.Module) -> int:
    """The number of layers that `restart_at_every_sequence` reaches."""
    return sum(type(module).__name__ in _MIXERS for module in model.modules())
