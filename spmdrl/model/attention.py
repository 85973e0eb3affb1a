"""Packed attention behind one name in transformers' attention interface.

A model built with `attn_implementation="spmdrl"` hands every attention layer to the `attend` function that its caller
passed to `model(..., attend=...)`. The caller knows how the tokens are laid out (packed sequences in training, a KV
cache in the embedded engine), so no layer has to infer it from masks or position ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from spmdrl.data.families import family_of
from spmdrl.model.attention_layer import Attend, AttentionLayer
from spmdrl.model.block_attention import Block, seeing_blocks
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention, load_varlen
from spmdrl.types import UserError

IMPLEMENTATION = "spmdrl"

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
    index: Any = module.layer_idx  # every attention module of transformers has one
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = AttentionLayer(index=index, scale=scale, window=sliding_window, sinks=s_aux)
    width = value.shape[-1]
    # Kernels and exchanges need heads of one size; DeepSeek's values are narrower than its keys.
    value = F.pad(value, (0, query.shape[-1] - width)) if width < query.shape[-1] else value
    return attend(query, key, value, layer)[..., :width], None


AttentionInterface.register(IMPLEMENTATION, _attention_function)


def packed_attention(
    cu_seqlens: Tensor,
    seqlens: list[int],
    kernel: Kernel,
    *,
    sampled: Tensor | None = None,
    blocks: Sequence[Block] = (),
) -> Attend:
    """Causal attention within each sequence of a packed micro-batch.

    cu_seqlens is [S+1] int32 on the device of the tokens, seqlens the same lengths on the host. sampled [T] bool marks
    the tokens that an engine decoded; only kernels that reproduce an engine's bits read it. The tokens of each of the
    `blocks`, which are in order, see each other as well.
    """
    causal = causal_attention(SequenceLayout(seqlens, cu_seqlens, sampled=sampled), kernel)
    if blocks:
        causal = seeing_blocks(causal, seqlens, blocks, kernel)

    def attend(query: Tensor, key: Tensor, value: Tensor, layer: AttentionLayer) -> Tensor:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return causal(q, k, v, layer).unsqueeze(0)

    return attend


def choose_kernel(setting: Literal["auto"] | Kernel, device_type: str, dtype: torch.dtype) -> Kernel:
    """Choose the attention kernel that `model.attention` means on this kind of device and in this dtype.

    Raises UserError when that kernel cannot run here.
    """
    has_kernels = device_type == "cuda" and dtype.itemsize == 2 and torch.cuda.get_device_capability() >= (8, 0)
    if setting == "auto":
        return "varlen" if has_kernels else "sdpa"
    if setting != "sdpa":
        if not has_kernels:
            raise UserError(
                f'model.attention = "{setting}" needs a CUDA device of compute capability 8.0 and model.compute_dtype '
                f'"bfloat16" or "float16" (here: {device_type}, {dtype}); set it to "auto" or "sdpa"'
            )
        if setting == "flash_attn_3" and (found := torch.cuda.get_device_capability())[0] > 9:
            raise UserError(
                'model.attention = "flash_attn_3" has no kernels for devices of compute capability '
                f'{".".join(map(str, found))}, only up to 9.0 (Hopper); set it to "auto"'
            )
        load_varlen(setting)
    return setting


def fastest_varlen(model: nn.Module) -> Kernel:
    """Choose the kernel of a CUDA device that has torch's: FlashAttention 3 on Hopper, where it can be imported.

    A model with attention sinks stays with torch's kernel, which returns what they need; so does one whose images are
    seen whole.
    """
    needs_torch = any(hasattr(module, "sinks") for module in model.modules())
    if isinstance(model, PreTrainedModel):
        family = family_of(model.config)
        needs_torch |= family is not None and family.sees_whole_images
    if needs_torch or torch.cuda.get_device_capability()[0] != 9:
        return "varlen"
    try:
        load_varlen("flash_attn_3")
    except UserError:
        return "varlen"
    return "flash_attn_3"
