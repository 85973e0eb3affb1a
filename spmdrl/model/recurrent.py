"""Recurrent layers over packed sequences: their state is reset at the start of every sequence.

A gated delta net of transformers takes [batch, tokens] and starts every row of the batch with an empty state. The
caller of a packed model passes `seqlens`, and each run of sequences of equal length becomes one such batch.
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
        assert seqlens is not None, "a recurrent layer needs `seqlens` to know where sequences begin"
        assert cache_params is None and attention_mask is None, "packed sequences have no cache and no padding"
        outputs = []
        for tokens, count, length in runs_of_equal_length(seqlens):
            batch = hidden_states[0, tokens].unflatten(0, (count, length))
            # Without `others`: they are for attention, and this layer's kernels do not accept them.
            outputs.append(super().forward(batch).flatten(0, 1))
        return torch.cat(outputs).unsqueeze(0)


def restart_at_every_sequence(model: nn.Module) -> None:
    """Make the model's recurrent layers restart at every sequence. Call it before the model is sharded."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _MIXERS:
            module.__class__ = type(kind.__name__, (_RestartsAtEverySequence, kind), {"__module__": kind.__module__})


def restartable_layers(model: nn.Module) -> int:
    """Count the layers that `restart_at_every_sequence` can change."""
    return sum(type(module).__name__ in _MIXERS for module in model.modules())
