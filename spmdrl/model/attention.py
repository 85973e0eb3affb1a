"""Packed attention behind one name in transformers' attention interface.

A model built with `attn_implementation="spmdrl"` hands every attention layer to the `attend` function its caller
passed to `model(..., attend=...)`. Who calls the model knows how its tokens are laid out (packed sequences in
training, a KV cache in the embedded engine), so no layer has to guess it from masks or position ids.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention, load_varlen
from spmdrl.types import UserError

IMPLEMENTATION = "spmdrl"


class Attend(Protocol):
    """Attention over the caller's token layout.

    query is [1, H, T, D], key and value [1, K, T, D] with K dividing H; the result is [1, T, H, D]. A head's sink, of
    sinks [H], is one more score in each of its softmaxes, and has no value.
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


# Arguments of transformers' attention functions that change the result in ways no kernel here implements.
_UNSUPPORTED = ("softcap", "head_mask", "position_bias")


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
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    assert dropout == 0.0, "policies are trained without dropout"
    if attend is None or attention_mask is not None:
        does = "does not pass its caller's arguments on" if attend is None else "makes a mask of its own"
        raise UserError(f"model.path: {type(module).__name__} {does}, so sequences cannot be packed")
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise UserError(f"model.path: {type(module).__name__} uses attention with {name}, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx  # every attention module of transformers has one
    width = value.shape[-1]
    # Kernels and exchanges want heads of one size; DeepSeek's attention has narrower values.
    value = F.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    out = attend(query, key, value, layer=layer, scale=scale, window=sliding_window, sinks=s_aux)
    return out[..., :width], None


AttentionInterface.register(IMPLEMENTATION, _attention_function)


def packed_attention(
    cu_seqlens: Tensor, seqlens: list[int], kernel: Kernel, *, sampled: Tensor | None = None
) -> Attend:
    """Causal attention within each of the sequences that lie end to end in a micro-batch.

    cu_seqlens is [S+1] int32 on the device of the tokens, seqlens the same lengths on the host; sampled [T] bool says
    which tokens an engine decoded, for kernels that are to do what it did.
    """
    causal = causal_attention(SequenceLayout(seqlens, cu_seqlens, sampled=sampled), kernel)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return causal(q, k, v, scale=scale, window=window, sinks=sinks).unsqueeze(0)

    return attend


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
        load_varlen(setting)
    return setting
