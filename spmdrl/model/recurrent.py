"""Recurrent layers over packed sequences: a state starts with every sequence, or continues that of an earlier call.

A layer of transformers takes [batch, tokens] and knows no boundaries inside a row. Here the layer keeps its weights,
and its forward pass (`mixer.py`) takes the lengths of the packed sequences. The rules are in files of their own:
`gated_delta.py`, or the kernels in `gated_delta_cuda.py`, and `ssd.py` for Mamba 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.families import FAMILIES, ModelFamily, family_of
from spmdrl.model import gated_delta, gated_delta_cuda
from spmdrl.model.layer_kinds import recurrent_layers
from spmdrl.model.mixer import LayerStates, Mixer, NodeLevels, Projected, Weights
from spmdrl.model.ssd import state_space_rule


class _GatedDeltaNet(Mixer):
    """Gated delta nets; kinds differ in their projections, and in the order of what these give."""

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
        self,
        mixed: Tensor,
        of_heads: Sequence[Tensor],
        weights: Weights,
        seqlens: list[int],
        state: Tensor | None,
        keeps_state: bool,
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


class _Mamba2(Mixer):
    """Mamba 2, of Nemotron-H, Granite 4, Bamba and Falcon-H1.

    Each of H heads has a state [N, P]; groups of heads share what reads and what writes it (C and B). All of it is
    computed in float32 by `ssd.py`, on a CPU as on CUDA: no package is needed. Ranks that share the tokens of sequences
    exchange them for heads; those that have a part of a group's heads each get what the group shares.
    """

    num_heads: int
    head_dim: int
    n_groups: int
    ssm_state_size: int
    intermediate_size: int
    time_step_limit: tuple[float, float]
    in_proj: nn.Module
    conv1d: nn.Conv1d
    A_log: nn.Parameter
    D: nn.Parameter
    dt_bias: nn.Parameter
    norm: nn.Module

    def _project(self, hidden: Tensor) -> Projected:
        widths = (self.intermediate_size, len(self.conv1d.weight), self.num_heads)
        gate, channels, steps = self._projected(hidden).split(widths, dim=-1)
        return Projected(channels, gate, [steps])

    def _projected(self, hidden: Tensor) -> Tensor:
        """Map hidden [T, D] to gates, what is convolved, and time steps, side by side."""
        projected: Tensor = self.in_proj(hidden)
        return projected

    def _weights(self) -> Weights:
        return Weights(self.conv1d.weight.squeeze(1), self.conv1d.bias, (self.A_log, self.dt_bias, self.D))

    def _parts(self, x: Tensor, dim: int, num_ranks: int) -> Sequence[Tensor]:
        """Split channels into values, which belong to heads, and keys and queries, which belong to groups.

        Of a group that several ranks have a part of, each gets a copy.
        """
        shared = self.n_groups * self.ssm_state_size
        copies = max(1, num_ranks // self.n_groups)
        values, *grouped = x.split((self.intermediate_size, shared, shared), dim=dim)
        by_group = [y.unflatten(dim, (self.n_groups, -1)).repeat_interleave(copies, dim=dim) for y in grouped]
        return [values, *(y.flatten(dim, dim + 1) for y in by_group)]

    def _rule(
        self,
        mixed: Tensor,
        of_heads: Sequence[Tensor],
        weights: Weights,
        seqlens: list[int],
        state: Tensor | None,
        keeps_state: bool,
    ) -> tuple[Tensor, Tensor]:
        """Apply the rule to values, keys and queries side by side [T, C], with time steps [T, H]."""
        (steps,), (decay, time_step, skip) = of_heads, weights.of_heads
        width = steps.shape[1] * self.head_dim
        shared = (mixed.shape[1] - width) // 2
        value, key, query = mixed.float().split((width, shared, shared), dim=-1)
        value = value.unflatten(-1, (-1, self.head_dim))
        time = F.softplus(steps.float() + time_step.float()).clamp(*self.time_step_limit)
        out, state = state_space_rule(
            query.unflatten(-1, (-1, self.ssm_state_size)),
            key.unflatten(-1, (-1, self.ssm_state_size)),
            value * time.unsqueeze(-1),
            -decay.float().exp() * time,
            seqlens,
            state,
            keeps_state=keeps_state,
        )
        return (out + value * skip.float().unsqueeze(-1)).flatten(1), state

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        normed: Tensor = self.norm(out, gate)
        return normed


class _FalconMamba2(_Mamba2):
    """Falcon-H1's, with multipliers, and where the norm may be left out."""

    mup_vector: Tensor
    ssm_in_multiplier: float
    mamba_rms_norm: bool

    def _projected(self, hidden: Tensor) -> Tensor:
        return super()._projected(hidden * self.ssm_in_multiplier) * self.mup_vector[0]

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        return super()._gated(out, gate) if self.mamba_rms_norm else out * F.silu(gate)


class _ShortConv(Mixer):
    """LFM2's layer, without attention: what a token projects to is multiplied, convolved, and multiplied again."""

    activation = None
    conv: nn.Conv1d
    in_proj: nn.Module

    def _project(self, hidden: Tensor) -> Projected:
        b, c, x = self.in_proj(hidden).chunk(3, dim=-1)
        return Projected(b * x, gate=c)

    def _weights(self) -> Weights:
        return Weights(self.conv.weight.squeeze(1), self.conv.bias)

    def _parts(self, x: Tensor, dim: int, num_ranks: int) -> Sequence[Tensor]:
        return [x]

    def _rule(
        self, mixed: Tensor, of_heads: Any, weights: Any, seqlens: list[int], state: Any, keeps_state: bool
    ) -> tuple[Tensor, Tensor]:
        return mixed, mixed.new_zeros(len(seqlens), 0, dtype=torch.float32)  # its inputs are all the state

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        return gate * out


class _Block(nn.Module):
    """A block of LFM2: transformers' own does not hand its caller's arguments to the convolution."""

    is_attention_layer: bool
    self_attn: nn.Module
    conv: nn.Module
    operator_norm: nn.Module
    ffn_norm: nn.Module
    feed_forward: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        *,
        seqlens: list[int] | NodeLevels,
        states: LayerStates | None = None,
        **attention: Any,
    ) -> Tensor:
        """hidden_states is [1, T, D], as is the result."""
        normed = self.operator_norm(hidden_states)
        if self.is_attention_layer:
            mixed, _ = self.self_attn(normed, **attention)
        else:
            mixed = self.conv(normed, seqlens=seqlens, states=states)
        hidden_states = hidden_states + mixed
        out: Tensor = hidden_states + self.feed_forward(self.ffn_norm(hidden_states))
        return out


def _mixers(family: ModelFamily) -> Iterator[tuple[str, type[Mixer]]]:
    """Yield a family's recurrent layers: the names of transformers' classes, and ours."""
    if family.delta_net is not None:
        has_fused = family.delta_net == "fused"
        yield f"{family.classes}GatedDeltaNet", _WithFusedProjections if has_fused else _WithSeparateProjections
    if family.mamba2 is not None:
        yield f"{family.classes}{family.mamba2.mixer}", _FalconMamba2 if family.mamba2.has_multipliers else _Mamba2
    if family.has_short_convs:
        yield f"{family.classes}ShortConv", _ShortConv


_MIXERS = dict(mixer for family in FAMILIES.values() for mixer in _mixers(family))
_BLOCKS = {f"{family.classes}DecoderLayer": _Block for family in FAMILIES.values() if family.has_short_convs}


def packed_layers(model: nn.Module, context: DeviceMesh | None = None) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the model's recurrent layers, each with a class that restarts at every sequence.

    `context` is the mesh of ranks that share a micro-batch's tokens; None is this rank alone.
    """
    for module in model.modules():
        kind = type(module)
        if mixer := (_MIXERS | _BLOCKS).get(kind.__name__):
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
