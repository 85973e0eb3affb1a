"""Gated delta nets over packed sequences: their state begins anew with every sequence, or goes on from an earlier call.

A layer of transformers takes [batch, tokens] and knows no boundaries inside a row. Here the layer keeps its weights,
and its forward pass takes the lengths of the packed sequences (`gated_delta.py`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from spmdrl.model.gated_delta import causal_conv, gated_delta_rule


class LayerStates(Protocol):
    """What recurrent layers remember of each of S sequences, by layer."""

    def take(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Conv inputs [S, C, kernel - 1] in the layer's dtype and state [S, H, Dk, Dv] float32 to go on from; None:
        from nothing."""

    def keep(self, layer: int, conv: Tensor, state: Tensor) -> None:
        """What is left after the last token of each sequence, in the same shapes."""


class _GatedDeltaNet(nn.Module):
    """The forward pass of all kinds; what they project a token to, and in which order, differs."""

    layer_idx: int
    activation: str
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    conv1d: nn.Conv1d
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    norm: nn.Module
    out_proj: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        *,
        seqlens: list[int] | None = None,
        states: LayerStates | None = None,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """hidden_states is [1, T, D], as is the result. Sequences go on from `states`, which keep what is left."""
        assert seqlens is not None, "a recurrent layer needs `seqlens` to know where sequences begin"
        assert cache_params is None and attention_mask is None, "packed sequences have no cache and no padding"
        mixed, z, b, a = self._project(hidden_states[0])
        conv, state = (None, None) if states is None else states.take(self.layer_idx) or (None, None)
        mixed, conv = causal_conv(mixed, self.conv1d.weight.squeeze(1), self.conv1d.bias, seqlens, conv)
        query, key, value = ACT2FN[self.activation](mixed).split((self.key_dim, self.key_dim, self.value_dim), dim=-1)
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        out, state = gated_delta_rule(
            query.unflatten(-1, (-1, self.head_k_dim)),
            key.unflatten(-1, (-1, self.head_k_dim)),
            value.unflatten(-1, (-1, self.head_v_dim)),
            decay,
            b.sigmoid(),
            seqlens,
            state,
        )
        if states is not None:
            states.keep(self.layer_idx, conv, state)
        normed = self.norm(out.flatten(0, 1), z.reshape(-1, self.head_v_dim))
        projected: Tensor = self.out_proj(normed.view(1, len(out), -1))
        return projected

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Map hidden [T, D] to queries, keys and values side by side [T, C], the gate z [T, H * Dv], b and a [T, H]."""
        raise NotImplementedError


class _WithFusedProjections(_GatedDeltaNet):
    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        groups = self.num_v_heads // self.num_k_heads
        # Outputs are ordered by key head: its query, its key, the values of its group, their gates.
        by_head = self.in_proj_qkvz(hidden).unflatten(-1, (self.num_k_heads, -1))
        widths = (self.head_k_dim, self.head_k_dim, groups * self.head_v_dim, groups * self.head_v_dim)
        query, key, value, z = (x.flatten(1) for x in by_head.split(widths, dim=-1))
        b, a = self.in_proj_ba(hidden).unflatten(-1, (self.num_k_heads, 2, groups)).unbind(2)
        return torch.cat((query, key, value), dim=-1), z, b.flatten(1), a.flatten(1)


class _WithSeparateProjections(_GatedDeltaNet):
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.in_proj_qkv(hidden), self.in_proj_z(hidden), self.in_proj_b(hidden), self.in_proj_a(hidden)


_MIXERS: dict[str, type[_GatedDeltaNet]] = {
    "Qwen3NextGatedDeltaNet": _WithFusedProjections,
    "Qwen3_5GatedDeltaNet": _WithSeparateProjections,
    "Qwen3_5MoeGatedDeltaNet": _WithSeparateProjections,
}


def restart_at_every_sequence(model: nn.Module) -> None:
    """Make the model's recurrent layers restart at every sequence. Call it before the model is sharded."""
    for module in model.modules():
        kind = type(module)
        if mixer := _MIXERS.get(kind.__name__):
            module.__class__ = type(kind.__name__, (mixer, kind), {"__module__": kind.__module__})


def restartable_layers(model: nn.Module) -> int:
    """Count the layers that `restart_at_every_sequence` can change."""
    return sum(type(module).__name__ in _MIXERS for module in model.modules())
