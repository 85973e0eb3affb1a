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
    num_before = weight.shape[1] - 1
    places = _places_after_gaps(tuple(seqlens), num_before, x.device)
    padded = x.new_zeros(len(x) + len(seqlens) * num_before, x.shape[1])
    if before is not None:
        padded = padded.index_copy(0, places.gaps, before.to(x.dtype).transpose(1, 2).flatten(0, 1))
    padded = padded.index_copy(0, places.tokens, x)
    out = F.conv1d(padded.t().unsqueeze(0).to(weight.dtype), weight.unsqueeze(1), bias, groups=len(weight))[0].t()
    left = padded[places.last].unflatten(0, (-1, num_before)).transpose(1, 2)
    return out[places.tokens - num_before].to(x.dtype), left


def _one_token_each(x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor) -> tuple[Tensor, Tensor]:
    window = torch.cat((before.to(x.dtype), x.unsqueeze(-1)), dim=-1)  # [S, C, W]
    out = (window.float() * weight.float()).sum(-1)  # torch's convolution sums in float32 too
    return (out if bias is None else out + bias).to(x.dtype), window[..., 1:]


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Places of rows when there is a gap before every sequence."""

    tokens: Tensor  # [T] int64
    gaps: Tensor  # [S * gap] int64
    last: Tensor  # [S * gap] int64, the last rows of each sequence with its gap


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # an engine may ask first, and autograd later
def _places_after_gaps(seqlens: tuple[int, ...], gap: int, device: torch.device) -> _Gaps:
    lengths = torch.tensor(seqlens)
    index = torch.arange(len(lengths))
    ends = (lengths + gap).cumsum(0)
    tokens = torch.arange(sum(seqlens)) + (index.repeat_interleave(lengths) + 1) * gap
    window = torch.arange(gap)
    gaps = ((ends - lengths - gap).unsqueeze(1) + window).flatten()
    last = ((ends - gap).unsqueeze(1) + window).flatten()
    return _Gaps(tokens.to(device), gaps.to(device), last.to(device))
