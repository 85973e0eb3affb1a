"""The kernels for gated delta nets on CUDA, of packages that are used where they are installed.

flash-linear-attention (`fla`) has the gated delta rule, in half precision only; causal-conv1d has the convolution. Both
know packed sequences: the first by offsets, the second by the index of each token's sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

# What causal-conv1d's kernel can do with tokens [T, C] and their sequences.
_WIDTHS = range(2, 5)
_CHANNEL_STEP = 8
_ACTIVATIONS = (None, "silu", "swish")


@functools.cache
def _fla() -> Callable[..., Any] | None:
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    rule: Callable[..., Any] = chunk_gated_delta_rule
    return rule


@functools.cache
def _causal_conv1d() -> Callable[..., Tensor] | None:
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return None
    conv: Callable[..., Tensor] = causal_conv1d_fn
    return conv


@functools.cache
def _is_refused() -> bool:
    """Return True where `fla` raises in the backward pass: Triton 3.4 to 3.7.0 computes it wrongly on Hopper."""
    if torch.cuda.get_device_capability()[0] != 9:
        return False
    import triton

    return Version("3.4") <= Version(triton.__version__) < Version("3.7.1")


def has_rule(device_type: str, dtype: torch.dtype) -> bool:
    """Return True when `gated_delta_rule` can be called there, in that dtype."""
    return device_type == "cuda" and dtype.itemsize == 2 and _fla() is not None and not _is_refused()


def has_conv(device_type: str, weight: Tensor, activation: str | None) -> bool:
    """Return True when `causal_conv` can be called there, with this weight [C, W]."""
    channels, width = weight.shape
    is_supported = width in _WIDTHS and channels % _CHANNEL_STEP == 0 and activation in _ACTIVATIONS
    return device_type == "cuda" and is_supported and _causal_conv1d() is not None


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    seqlens: list[int],
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Call fla's kernel for what `gated_delta.gated_delta_rule` does."""
    rule = _fla()
    assert rule is not None, "ask `has_rule` first"
    groups = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (query, key))
    out, final = rule(
        *(x.unsqueeze(0) for x in (query, key, value)),
        g=decay.unsqueeze(0),
        beta=beta.unsqueeze(0),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=_offsets(tuple(seqlens), value.device),
    )
    return out[0], final


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, seqlens: list[int]) -> Tensor:
    """Convolve sequences that start from nothing, and apply the activation, if any: x [T, C], weight [C, W]; [T, C]."""
    conv = _causal_conv1d()
    assert conv is not None, "ask `has_conv` first"
    # The kernel wants [1, C, T] with the channels next to each other in memory.
    rows = x.contiguous().unsqueeze(0).transpose(1, 2)
    out = conv(rows, weight, bias, seq_idx=_sequence_of_token(tuple(seqlens), x.device), activation=activation)
    return out[0].t()


@functools.lru_cache(maxsize=8)  # all layers ask for the same; fla, too, remembers what it made of this very tensor
@torch.inference_mode(mode=False)  # an engine may be the first to ask, and a trainer the second
def _offsets(seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([*accumulate(seqlens, initial=0)]).to(device)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(mode=False)
def _sequence_of_token(seqlens: tuple[int, ...], device: torch.device) -> Tensor:
    index = torch.arange(len(seqlens), dtype=torch.int32).repeat_interleave(torch.tensor(seqlens))
    return index.unsqueeze(0).to(device)
