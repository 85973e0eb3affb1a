"""Causal depthwise convolution of packed sequences, each of which goes on from its own inputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


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
