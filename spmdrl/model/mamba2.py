"""Mamba 2 over packed sequences: the layers of Nemotron-H, Granite 4, Bamba and Falcon-H1.

Each of H heads has a state [N, P]; groups of heads share what reads and what writes it (C and B). All of it is
computed in float32 by `ssd.py`, on a CPU as on CUDA: no package is needed. Ranks that share the tokens of sequences
exchange them for heads; those that have a part of a group's heads each get what the group shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.families import FAMILIES
from spmdrl.model.short_conv import Mixer, Projected, Weights
from spmdrl.model.ssd import state_space_rule


class _Mamba2(Mixer):
    """The computation that all families share: between the projections, and with them."""

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
        self, mixed: Tensor, of_heads: Sequence[Tensor], weights: Weights, seqlens: list[int], state: Tensor | None
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


_KINDS: dict[bool, type[_Mamba2]] = {False: _Mamba2, True: _FalconMamba2}
MIXERS: dict[str, type[Mixer]] = {
    f"{family.classes}{family.mamba2.mixer}": _KINDS[family.mamba2.has_multipliers]
    for family in FAMILIES.values()
    if family.mamba2 is not None
}
