"""Mamba 2 over packed sequences: the layers of Nemotron-H, Granite 4, Bamba and Falcon-H1.

Each of H heads has a state [N, P]; groups of heads share what reads and what writes it (C and B). All of it is
computed in float32 by `ssd.py`, on a CPU as on CUDA: no package is needed. Ranks that share the tokens of sequences
exchange them for heads; those that have a part of a group's heads each get what the group shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.families import FAMILIES
from spmdrl.model.context import heads_for_tokens, tokens_for_heads
from spmdrl.model.layer_states import LayerStates, NodeLevels, mix_sequences
from spmdrl.model.short_conv import convolve
from spmdrl.model.ssd import state_space_rule


class _Weights(NamedTuple):
    """The parameters of H heads and G groups between the projections."""

    conv: Tensor  # [H P + 2 G N, W]
    conv_bias: Tensor | None  # the same channels
    decay: Tensor  # [H], A_log of the files
    time_step: Tensor  # [H]
    skip: Tensor  # [H], D of the files


class _Mamba2(nn.Module):
    """The forward pass of all families."""

    layer_idx: int
    activation: str
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
        projected = self._project(hidden_states[0])
        gate, mixed, steps = projected.split((self.intermediate_size, len(self.conv1d.weight), self.num_heads), dim=-1)
        weights = _Weights(self.conv1d.weight.squeeze(1), self.conv1d.bias, self.A_log, self.dt_bias, self.D)
        if self.context is None:
            out = mix_sequences(self._mix, (mixed, steps), weights, seqlens, states)
        else:
            assert states is None, "engines sample whole sequences"
            out = self._mix_own_heads(mixed, steps, weights, seqlens, self.context)
        result: Tensor = self.out_proj(self._gated(out, gate).to(hidden_states.dtype)[None])
        return result

    def _project(self, hidden: Tensor) -> Tensor:
        """Map hidden [T, D] to gates, what is convolved, and time steps, side by side."""
        projected: Tensor = self.in_proj(hidden)
        return projected

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """Norm and gate the heads' outputs, both [T, H P]."""
        normed: Tensor = self.norm(out, gate)
        return normed

    def _mix_own_heads(
        self, mixed: Tensor, steps: Tensor, weights: _Weights, seqlens: list[int] | NodeLevels, mesh: DeviceMesh
    ) -> Tensor:
        """Exchange tokens for heads, mix all tokens in this rank's heads, and exchange back."""
        rank, num_ranks = mesh.get_local_rank(), mesh.size()
        shared = self.n_groups * self.ssm_state_size
        copies = max(1, num_ranks // self.n_groups)  # of a group that several ranks have a part of

        def parts(x: Tensor, dim: int) -> list[Tensor]:
            """Split what is convolved into what belongs to heads, and twice to groups, a copy for each of its ranks."""
            values, *grouped = x.split((self.intermediate_size, shared, shared), dim=dim)
            by_group = [y.unflatten(dim, (self.n_groups, -1)).repeat_interleave(copies, dim=dim) for y in grouped]
            return [values, *(y.flatten(dim, dim + 1) for y in by_group)]

        def own(x: Tensor) -> Tensor:
            return torch.cat([part.chunk(num_ranks)[rank] for part in parts(x, 0)])

        heads = (weights.decay, weights.time_step, weights.skip)
        own_weights = _Weights(
            own(weights.conv),
            None if weights.conv_bias is None else own(weights.conv_bias),
            *(x.chunk(num_ranks)[rank] for x in heads),
        )
        *own_mixed, own_steps = tokens_for_heads([*parts(mixed, 1), steps], mesh)
        out = mix_sequences(self._mix, (torch.cat(own_mixed, dim=-1), own_steps), own_weights, seqlens)
        return heads_for_tokens(out, mesh)

    def _mix(
        self, per_token: Sequence[Tensor], weights: _Weights, seqlens: list[int], states: LayerStates | None
    ) -> Tensor:
        """Convolve values, keys and queries side by side [T, C], and apply the rule with time steps [T, H]."""
        mixed, steps = per_token
        before, state = (None, None) if states is None else states.take(self.layer_idx) or (None, None)
        mixed, left = convolve(mixed, weights.conv, weights.conv_bias, self.activation, seqlens, states, before)
        width = steps.shape[1] * self.head_dim
        shared = (mixed.shape[1] - width) // 2
        value, key, query = mixed.float().split((width, shared, shared), dim=-1)
        value = value.unflatten(-1, (-1, self.head_dim))
        time = F.softplus(steps.float() + weights.time_step.float()).clamp(*self.time_step_limit)
        out, state = state_space_rule(
            query.unflatten(-1, (-1, self.ssm_state_size)),
            key.unflatten(-1, (-1, self.ssm_state_size)),
            value * time.unsqueeze(-1),
            -weights.decay.float().exp() * time,
            seqlens,
            state,
        )
        if states is not None:
            assert left is not None
            states.keep(self.layer_idx, left, state)
        return (out + value * weights.skip.float().unsqueeze(-1)).flatten(1)


class _FalconMamba2(_Mamba2):
    """Falcon-H1's, with multipliers, and where the norm may be left out."""

    mup_vector: Tensor
    ssm_in_multiplier: float
    mamba_rms_norm: bool

    def _project(self, hidden: Tensor) -> Tensor:
        return super()._project(hidden * self.ssm_in_multiplier) * self.mup_vector[0]

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        return super()._gated(out, gate) if self.mamba_rms_norm else out * F.silu(gate)


_KINDS: dict[bool, type[_Mamba2]] = {False: _Mamba2, True: _FalconMamba2}
MIXERS: dict[str, type[nn.Module]] = {
    f"{family.classes}{family.mamba2.mixer}": _KINDS[family.mamba2.has_multipliers]
    for family in FAMILIES.values()
    if family.mamba2 is not None
}
