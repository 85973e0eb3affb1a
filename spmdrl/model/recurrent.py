"""Recurrent layers over packed sequences: a state starts with every sequence, or goes on from an earlier call.

A layer of transformers takes [batch, tokens] and knows no boundaries inside a row. Here the layer keeps its weights,
and its forward pass takes the lengths of the packed sequences. This file has gated delta nets, with `gated_delta.py` or
the kernels in `gated_delta_cuda.py`; `mamba2.py` has Mamba 2, and `short_conv.py` short convolutions.

Heads have nothing to do with each other. Ranks that share the tokens of sequences therefore exchange them for heads, so
that no state goes from rank to rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.families import FAMILIES, family_of
from spmdrl.model import gated_delta, gated_delta_cuda
from spmdrl.model.context import heads_for_tokens, tokens_for_heads
from spmdrl.model.layer_kinds import recurrent_layers
from spmdrl.model.layer_states import LayerStates, NodeLevels, mix_sequences
from spmdrl.model.mamba2 import MIXERS as MAMBA2
from spmdrl.model.short_conv import BLOCKS, convolve
from spmdrl.model.short_conv import MIXERS as SHORT_CONVS


class _Weights(NamedTuple):
    """The parameters of K key heads and H value heads between the projections."""

    conv: Tensor  # [C, W], for the channels of all queries, then keys, then values
    conv_bias: Tensor | None  # [C]
    decay: Tensor  # [H], A_log of the files
    time_step: Tensor  # [H]


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
    context: DeviceMesh | None  # ranks that share the tokens; None is this rank alone

    def forward(
        self,
        hidden_states: Tensor,
        *,
        seqlens: list[int] | NodeLevels | None = None,
        states: LayerStates | None = None,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """hidden_states is [1, T, D], as is the result. Sequences go on from `states`, which keep what is left.

        Under context parallelism hidden_states is this rank's chunk of the tokens that `seqlens` describes.
        """
        assert seqlens is not None, "a recurrent layer needs `seqlens` to know where sequences begin"
        assert cache_params is None and attention_mask is None, "packed sequences have no cache and no padding"
        mixed, z, b, a = self._project(hidden_states[0])
        weights = _Weights(self.conv1d.weight.squeeze(1), self.conv1d.bias, self.A_log, self.dt_bias)
        if self.context is None:
            out = mix_sequences(self._mix, (mixed, b, a), weights, seqlens, states)
        else:
            assert states is None, "engines sample whole sequences"
            out = self._mix_own_heads(mixed, b, a, weights, seqlens, self.context)
        normed = self.norm(out.reshape(-1, self.head_v_dim), z.reshape(-1, self.head_v_dim))
        projected: Tensor = self.out_proj(normed.view(1, len(out), -1))
        return projected

    def _mix_own_heads(
        self,
        mixed: Tensor,
        b: Tensor,
        a: Tensor,
        weights: _Weights,
        seqlens: list[int] | NodeLevels,
        mesh: DeviceMesh,
    ) -> Tensor:
        """Exchange tokens for heads, mix all tokens in this rank's heads, and exchange back."""
        rank, num_ranks = mesh.get_local_rank(), mesh.size()
        widths = (self.key_dim, self.key_dim, self.value_dim)

        def own(x: Tensor) -> Tensor:
            return torch.cat([part.chunk(num_ranks)[rank] for part in x.split(widths)])

        own_weights = _Weights(
            own(weights.conv),
            None if weights.conv_bias is None else own(weights.conv_bias),
            weights.decay.chunk(num_ranks)[rank],
            weights.time_step.chunk(num_ranks)[rank],
        )
        *own_mixed, b, a = tokens_for_heads([*mixed.split(widths, dim=-1), b, a], mesh)
        out = mix_sequences(self._mix, (torch.cat(own_mixed, dim=-1), b, a), own_weights, seqlens)
        return heads_for_tokens(out.flatten(1), mesh)

    def _mix(
        self, per_token: Sequence[Tensor], weights: _Weights, seqlens: list[int], states: LayerStates | None
    ) -> Tensor:
        """Convolve, and apply the rule: queries, keys and values side by side [T, C], b, a [T, H] give [T, H, Dv]."""
        mixed, b, a = per_token
        conv, state = (None, None) if states is None else states.take(self.layer_idx) or (None, None)
        device = mixed.device.type
        mixed, conv = convolve(mixed, weights.conv, weights.conv_bias, self.activation, seqlens, states, conv)
        value_width = b.shape[1] * self.head_v_dim
        key_width = (mixed.shape[1] - value_width) // 2
        query, key, value = mixed.split((key_width, key_width, value_width), dim=-1)
        rule = gated_delta_cuda if gated_delta_cuda.has_rule(device, mixed.dtype) else gated_delta
        out, state = rule.gated_delta_rule(
            query.unflatten(-1, (-1, self.head_k_dim)),
            key.unflatten(-1, (-1, self.head_k_dim)),
            value.unflatten(-1, (-1, self.head_v_dim)),
            -weights.decay.float().exp() * F.softplus(a.float() + weights.time_step),
            b.sigmoid(),
            seqlens,
            state,
        )
        if states is not None:
            assert conv is not None
            states.keep(self.layer_idx, conv, state)
        return out

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


_PROJECTIONS: dict[str, type[_GatedDeltaNet]] = {"fused": _WithFusedProjections, "separate": _WithSeparateProjections}
_MIXERS: dict[str, type[nn.Module]] = {
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
