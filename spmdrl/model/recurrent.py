"""Recurrent layers over packed sequences: a state starts with every sequence, or goes on from an earlier call.

A layer of transformers takes [batch, tokens] and knows no boundaries inside a row. Here the layer keeps its weights,
and its forward pass takes the lengths of the packed sequences. This file has gated delta nets, with `gated_delta.py` or
the kernels in `gated_delta_cuda.py`; `mamba2.py` has Mamba 2, and `short_conv.py` short convolutions and the forward
pass that all share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.families import FAMILIES, family_of
from spmdrl.model import gated_delta, gated_delta_cuda
from spmdrl.model.layer_kinds import recurrent_layers
from spmdrl.model.mamba2 import MIXERS as MAMBA2
from spmdrl.model.short_conv import BLOCKS, Mixer, Projected, Weights
from spmdrl.model.short_conv import MIXERS as SHORT_CONVS


class _GatedDeltaNet(Mixer):
    """The computation that all kinds share; projections, and the order of what they give, differ."""

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

    def _weights(self) -> Weights:
        return Weights(self.conv1d.weight.squeeze(1), self.conv1d.bias, (self.A_log, self.dt_bias))

    def _parts(self, x: Tensor, dim: int, num_ranks: int) -> Sequence[Tensor]:
        return x.split((self.key_dim, self.key_dim, self.value_dim), dim=dim)

    def _rule(
        self, mixed: Tensor, of_heads: Sequence[Tensor], weights: Weights, seqlens: list[int], state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Apply the rule to queries, keys and values side by side [T, C], with b and a, each [T, H]."""
        (b, a), (decay, time_step) = of_heads, weights.of_heads
        value_width = b.shape[1] * self.head_v_dim
        key_width = (mixed.shape[1] - value_width) // 2
        query, key, value = mixed.split((key_width, key_width, value_width), dim=-1)
        rule = gated_delta_cuda if gated_delta_cuda.has_rule(mixed.device.type, mixed.dtype) else gated_delta
        out, state = rule.gated_delta_rule(
            query.unflatten(-1, (-1, self.head_k_dim)),
            key.unflatten(-1, (-1, self.head_k_dim)),
            value.unflatten(-1, (-1, self.head_v_dim)),
            -decay.float().exp() * F.softplus(a.float() + time_step),
            b.sigmoid(),
            seqlens,
            state,
        )
        return out.flatten(1), state

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        normed: Tensor = self.norm(out.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
        return normed.view(len(out), -1)


class _WithFusedProjections(_GatedDeltaNet):
    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module

    def _project(self, hidden: Tensor) -> Projected:
        groups = self.num_v_heads // self.num_k_heads
        # Outputs are ordered by key head: its query, its key, the values of its group, their gates.
        by_head = self.in_proj_qkvz(hidden).unflatten(-1, (self.num_k_heads, -1))
        widths = (self.head_k_dim, self.head_k_dim, groups * self.head_v_dim, groups * self.head_v_dim)
        query, key, value, z = (x.flatten(1) for x in by_head.split(widths, dim=-1))
        b, a = self.in_proj_ba(hidden).unflatten(-1, (self.num_k_heads, 2, groups)).unbind(2)
        return Projected(torch.cat((query, key, value), dim=-1), z, (b.flatten(1), a.flatten(1)))


class _WithSeparateProjections(_GatedDeltaNet):
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module

    def _project(self, hidden: Tensor) -> Projected:
        channels, z = self.in_proj_qkv(hidden), self.in_proj_z(hidden)
        return Projected(channels, z, (self.in_proj_b(hidden), self.in_proj_a(hidden)))


_PROJECTIONS: dict[str, type[_GatedDeltaNet]] = {"fused": _WithFusedProjections, "separate": _WithSeparateProjections}
_MIXERS: dict[str, type[Mixer]] = {
    f"{family.classes}GatedDeltaNet": _PROJECTIONS[family.delta_net]
    for family in FAMILIES.values()
    if family.delta_net is not None
}
_MIXERS |= MAMBA2 | SHORT_CONVS


def packed_layers(model: nn.Module, context: DeviceMesh | None = None) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the model's recurrent layers, each with a class that restarts at every sequence.

    `context` is the mesh of ranks that share a micro-batch's tokens; None is this rank alone.
    """
    for module in model.modules():
        kind = type(module)
        if mixer := (_MIXERS | BLOCKS).get(kind.__name__):
            yield module, type(kind.__name__, (mixer, kind), {"__module__": kind.__module__, "context": context})


def restartable_layers(model: nn.Module) -> int:
    """Count the recurrent layers that `packed_layers` yields."""
    return sum(type(module).__name__ in _MIXERS for module in model.modules())


def recurrent_context_problems(model_config: Any, cp: int) -> Iterator[str]:
    """Yield a sentence when the heads of a model's recurrent layers cannot be split over `cp` ranks."""
    if not recurrent_layers(model_config):
        return
    family, groups = family_of(model_config), 1
    if family.mamba2 is not None:
        heads, what = getattr(model_config, family.mamba2.heads), "heads"
        groups = getattr(model_config, family.mamba2.groups)
    elif family.has_short_convs:
        heads, what = model_config.hidden_size, "channels"
    else:
        heads, what = model_config.linear_num_key_heads, "key heads"  # values have a multiple of it
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (n % groups == 0 or groups % n == 0)]
    if cp not in possible:
        grouped = f" in {groups} groups" if groups > 1 else ""
        yield (
            f"parallel.cp = {cp}, but the recurrent layers of {model_config.model_type} have {heads} {what}{grouped}, "
            f"which cannot be split over {cp} ranks; possible: {', '.join(map(str, possible))}"
        )
