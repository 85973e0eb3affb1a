"""Causal depthwise convolutions over packed sequences, each of which continues from its own inputs.

Recurrent layers have one in front of their rule. In LFM2 it is all that mixes tokens: the whole layer is here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.activations import ACT2FN

from spmdrl.families import FAMILIES
from spmdrl.model import gated_delta_cuda
from spmdrl.model.context import heads_for_tokens, tokens_for_heads
from spmdrl.model.layer_states import LayerStates, NodeLevels, mix_sequences


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, seqlens: list[int], before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve each sequence with the tokens before: return (out [T, C], [S, C, W - 1] inputs for what comes next).

    x is [T, C], weight [C, W]. before [S, C, W - 1] are the inputs before each sequence; None is 0.
    """
    if before is not None and max(seqlens) == 1:
        return _one_token_each(x, weight, bias, before)
    width = weight.shape[1]
    places = _places(tuple(seqlens), width - 1, x.device)
    rows = x.new_zeros(len(x) + len(seqlens) * (width - 1), x.shape[1])
    if before is not None:
        rows = rows.index_copy(0, places.gaps, before.to(x.dtype).transpose(1, 2).flatten(0, 1))
    rows = rows.index_copy(0, places.tokens, x)
    # Some results are of windows that reach over a boundary; they are not read.
    out = F.conv1d(rows.t().unsqueeze(0).to(weight.dtype), weight.unsqueeze(1), bias, groups=len(weight))[0].t()
    left = rows.index_select(0, places.ends).unflatten(0, (-1, width - 1)).transpose(1, 2)
    return out.index_select(0, places.windows).to(x.dtype), left


def _one_token_each(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> tuple[Tensor, Tensor]:
    window = torch.cat((before.to(x.dtype), x.unsqueeze(-1)), dim=-1)  # [S, C, W]
    out = (window.float() * weight.float()).sum(-1)  # torch's convolution sums in float32 too
    return (out if bias is None else out + bias).to(x.dtype), window[..., 1:]


@dataclass(frozen=True, slots=True)
class _Places:
    """The places of rows where every sequence has a gap before it."""

    tokens: Tensor  # [T] int64
    windows: Tensor  # [T] int64, the first row of each token's window
    gaps: Tensor  # [S * gap] int64
    ends: Tensor  # [S * gap] int64, as many rows at the end of each sequence


@functools.lru_cache(maxsize=8)  # all layers ask for the same
@torch.inference_mode(mode=False)  # an engine may be the first to ask, and a trainer the second
def _places(seqlens: tuple[int, ...], gap: int, device: torch.device) -> _Places:
    lengths = torch.tensor(seqlens)
    windows = torch.arange(sum(seqlens)) + torch.arange(len(lengths)).repeat_interleave(lengths) * gap
    ends = (lengths + gap).cumsum(0)
    gaps, last = ((starts.unsqueeze(1) + torch.arange(gap)).flatten() for starts in (ends - lengths - gap, ends - gap))
    return _Places(*(places.to(device) for places in (windows + gap, windows, gaps, last)))


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    seqlens: list[int],
    states: LayerStates | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return `causal_conv` with an activation function, by a kernel of CUDA's where no states are wanted."""
    if states is None and gated_delta_cuda.has_conv(x.device.type, weight, activation):
        return gated_delta_cuda.causal_conv(x, weight, bias, activation, seqlens), None
    out, left = causal_conv(x, weight, bias, seqlens, before)
    return out if activation is None else ACT2FN[activation](out), left


class _Weights(NamedTuple):
    """The parameters of C channels."""

    conv: Tensor  # [C, W]
    bias: Tensor | None  # [C]


class _ShortConv(nn.Module):
    """LFM2's layer: what a token projects to is multiplied, convolved, and multiplied again."""

    layer_idx: int
    conv: nn.Conv1d
    in_proj: nn.Module
    out_proj: nn.Module
    context: DeviceMesh | None  # ranks that share the tokens; None is this rank alone

    def forward(
        self, hidden_states: Tensor, *, seqlens: list[int] | NodeLevels, states: LayerStates | None = None
    ) -> Tensor:
        """hidden_states is [1, T, D], as is the result. Sequences go on from `states`, which keep what is left."""
        b, c, x = self.in_proj(hidden_states[0]).chunk(3, dim=-1)
        weights, mesh = _Weights(self.conv.weight.squeeze(1), self.conv.bias), self.context
        if mesh is None:
            mixed = mix_sequences(self._mix, [b * x], weights, seqlens, states)
        else:
            assert states is None, "engines sample whole sequences"
            rank, (own,) = mesh.get_local_rank(), tokens_for_heads([b * x], mesh)
            own_bias = None if weights.bias is None else weights.bias.chunk(mesh.size())[rank]
            own_weights = _Weights(weights.conv.chunk(mesh.size())[rank], own_bias)
            mixed = heads_for_tokens(mix_sequences(self._mix, [own], own_weights, seqlens), mesh)
        projected: Tensor = self.out_proj((c * mixed)[None])
        return projected

    def _mix(
        self, per_token: Sequence[Tensor], weights: _Weights, seqlens: list[int], states: LayerStates | None
    ) -> Tensor:
        (x,) = per_token
        before = None if states is None else states.take(self.layer_idx)
        out, left = convolve(x, *weights, None, seqlens, states, None if before is None else before[0])
        if states is not None:
            assert left is not None
            states.keep(self.layer_idx, left, left.new_zeros(len(left), 0, dtype=torch.float32))
        return out


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


_FAMILIES = [family.classes for family in FAMILIES.values() if family.has_short_convs]
MIXERS: dict[str, type[nn.Module]] = {f"{classes}ShortConv": _ShortConv for classes in _FAMILIES}
BLOCKS: dict[str, type[nn.Module]] = {f"{classes}DecoderLayer": _Block for classes in _FAMILIES}
