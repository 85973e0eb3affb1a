"""Packed attention behind one name in transformers' attention interface.

A model built with `attn_implementation="spmdrl"` hands every attention layer to the `attend` function its caller
passed to `model(..., attend=...)`. Who calls the model knows how its tokens are laid out (packed sequences in
training, a KV cache in the embedded engine), so no layer has to guess it from masks or position ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from spmdrl.types import UserError

IMPLEMENTATION = "spmdrl"

Kernel = Literal["sdpa", "varlen", "flash_attn_2", "flash_attn_3"]


class Attend(Protocol):
    """Attention over the caller's token layout.

    query is [1, H, T, D], key and value [1, K, T, D] with K dividing H; the result is [1, T, H, D].
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, scale: float, window: int | None
    ) -> Tensor: ...


# Arguments of transformers' attention functions that change the result in ways no kernel here implements.
_UNSUPPORTED = ("s_aux", "sinks", "softcap", "head_mask", "position_bias")


def _attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    assert attend is not None, f"{type(module).__name__} did not pass its caller's `attend` on"
    assert attention_mask is None, "packed attention takes its layout from `attend`, not from a mask"
    assert dropout == 0.0, "policies are trained without dropout"
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise UserError(f"model.path: {type(module).__name__} uses attention with {name}, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx  # every attention module of transformers has one
    return attend(query, key, value, layer=layer, scale=scale, window=sliding_window), None


AttentionInterface.register(IMPLEMENTATION, _attention_function)


def packed_attention(cu_seqlens: Tensor, seqlens: list[int], kernel: Kernel) -> Attend:
    """Causal attention within each of the sequences that lie end to end in a micro-batch.

    cu_seqlens is [S+1] int32 on the device of the tokens, seqlens the same lengths on the host.
    """
    if kernel == "sdpa":
        return _RunsOfEqualLength(seqlens)
    return _VarlenKernel(cu_seqlens, max(seqlens), _load_varlen(kernel))


@dataclass(frozen=True, slots=True)
class _RunsOfEqualLength:
    """One batched SDPA call for each run of neighbours of equal length; packing sorts by length, so runs are long."""

    seqlens: list[int]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, scale: float, window: int | None
    ) -> Tensor:
        # Heads last in memory, so that a run of sequences is a view: [T, heads, D].
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        outputs, start = [], 0
        for length, run in groupby(self.seqlens):
            count = sum(1 for _ in run)
            end = start + count * length
            rows = [x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
            outputs.append(_causal_sdpa(*rows, scale=scale, window=window).transpose(1, 2).flatten(0, 1))
            start = end
        return torch.cat(outputs).unsqueeze(0) if len(outputs) > 1 else outputs[0].unsqueeze(0)


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None) -> Tensor:
    """q [n, H, L, D], k and v [n, K, L, D]; a window of w lets a token see itself and w - 1 before it."""
    length, grouped = q.shape[2], q.shape[1] != k.shape[1]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    distance = torch.arange(length, device=q.device)
    distance = distance[:, None] - distance[None, :]
    visible = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=grouped)


@dataclass(frozen=True, slots=True)
class _VarlenKernel:
    """A CUDA kernel that takes cu_seqlens."""

    cu_seqlens: Tensor
    max_seqlen: int
    kernel: Callable[..., Tensor]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, layer: int, scale: float, window: int | None
    ) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        # Kernels count how far back a token sees beyond itself.
        sees = (-1, 0) if window is None else (window - 1, 0)
        return self.kernel(q, k, v, self.cu_seqlens, self.max_seqlen, scale, sees).unsqueeze(0)


def _load_varlen(kernel: Kernel) -> Callable[..., Tensor]:
    """The kernel under one signature: (q, k, v, cu_seqlens, max_seqlen, scale, window) -> [T, H, D]."""
    try:
        if kernel == "varlen":
            from torch.nn.attention.varlen import varlen_attn

            def run(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float, window: tuple) -> Tensor:
                groups = q.shape[1] // k.shape[1]
                # Repeated, not enable_gqa: torch 2.11 has no such argument.
                k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
                out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, window_size=window)
                assert isinstance(out, Tensor)  # it was not asked for anything besides
                return out

            return run
        if kernel == "flash_attn_2":
            from flash_attn import flash_attn_varlen_func
        else:
            from flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise UserError(f'model.attention = "{kernel}" needs a package that is not installed ({error})') from error
    return lambda q, k, v, cu, longest, scale, window: flash_attn_varlen_func(
        q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True, window_size=window
    )


def choose_kernel(setting: Literal["auto"] | Kernel, device_type: str, dtype: torch.dtype) -> Kernel:
    """The kernel that `model.attention` means there. Raises UserError when it cannot be had."""
    has_kernels = device_type == "cuda" and dtype.itemsize == 2 and torch.cuda.get_device_capability() >= (8, 0)
    if setting == "auto":
        return "varlen" if has_kernels else "sdpa"
    if setting != "sdpa":
        if not has_kernels:
            raise UserError(
                f'model.attention = "{setting}" needs a CUDA device of compute capability 8.0 and model.compute_dtype '
                f'"bfloat16" or "float16" (here: {device_type}, {dtype}); set it to "auto" or "sdpa"'
            )
        _load_varlen(setting)
    return setting
