"""Packed attention behind one name in transformers' attention interface.

A model built with `attn_implementation="spmdrl"` hands every attention layer to the `attend` function that its caller
passed to `model(..., attend=...)`. The caller knows how the tokens are laid out (packed sequences in training, a KV
cache in the embedded engine), so no layer has to infer it from masks or position ids.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from spmdrl.families import vision_family
from spmdrl.model.attention_layer import Attend, AttentionLayer, CausalAttention
from spmdrl.model.kernels import (
    Kernel,
    SequenceLayout,
    causal_attention,
    cumulative,
    for_varlen,
    has_flash,
    load_varlen,
)
from spmdrl.types import UserError

# Attention that is causal except in blocks, such as images, whose tokens see each other.
#
# The queries of a block see all keys from the beginning of their sequence to the end of the block; in a layer with a
# window, those that are not too far behind them. All other queries are causal. So a causal kernel computes all rows,
# and the rows of blocks are computed again and put in their places.


class Block(NamedTuple):
    """Tokens that see each other."""

    start: int  # the first of them
    end: int  # the first token after them
    only_in_windows: bool = False  # and not in layers without a window


class _View(NamedTuple):
    """A block and the tokens before it that it sees."""

    first: int  # token that it sees
    start: int  # its own first token
    end: int  # the first token after it


def seeing_blocks(
    causal: CausalAttention, seqlens: Sequence[int], blocks: Sequence[Block], kernel: Kernel
) -> CausalAttention:
    """Let the tokens of each block see each other; `causal` is the attention of packed sequences of these lengths.

    Raises UserError for a kernel that cannot.
    """
    if kernel not in ("sdpa", "varlen"):
        raise UserError(
            f'model.attention = "{kernel}" cannot let the tokens of an image see each other, as this model does; set '
            'it to "auto", "varlen" or "sdpa"'
        )
    starts = [*accumulate(seqlens, initial=0)]
    beginnings = [max(start for start in starts if start <= block.start) for block in blocks]
    rows = torch.cat([torch.arange(block.start, block.end) for block in blocks])
    only_in_windows = all(block.only_in_windows for block in blocks)
    rows_on = functools.cache(rows.to)

    @functools.cache
    def views(window: int | None) -> list[_View]:
        """The views of a layer with this window: nothing that no token of the block sees."""
        before = [0 if window is None else block.start - window + 1 for block in blocks]
        return [
            _View(max(found), block.start, block.end) for *found, block in zip(beginnings, before, blocks, strict=True)
        ]

    @functools.cache
    def whole(window: int | None, device: torch.device, by_flash: bool) -> _AttendBlocks:
        return _Together(views(window), device) if by_flash else functools.partial(_one_by_one, views(window))

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        assert layer.is_plain, "no model that sees images has attention sinks or caps scores"
        if layer.window is None and only_in_windows:
            return causal(q, k, v, layer)
        by_flash = kernel == "varlen" and has_flash(kernel, q.shape[-1], layer)
        again = whole(layer.window, q.device, by_flash)(q, k, v, layer)
        return causal(q, k, v, layer).index_copy(0, rows_on(q.device), again)

    return attend


_AttendBlocks = Callable[[Tensor, Tensor, Tensor, AttentionLayer], Tensor]  # to the rows of all blocks, [N, H, D]


def _one_by_one(views: Sequence[_View], q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """Call sdpa once for each block."""
    parts = []
    for first, start, end in views:
        visible = None
        if layer.window is not None:
            keys = torch.arange(first, end, device=q.device)
            visible = keys > torch.arange(start, end, device=q.device)[:, None] - layer.window
        query, key, value = (x.transpose(0, 1)[None] for x in (q[start:end], k[first:end], v[first:end]))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, visible, scale=layer.scale, enable_gqa=grouped)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


class _Together:
    """One call of torch's varlen kernel, in which the blocks are sequences with more keys than queries."""

    def __init__(self, views: Sequence[_View], device: torch.device) -> None:
        queries, keys = [end - start for _, start, end in views], [end - first for first, _, end in views]
        self._max_queries, self._max_keys = max(queries), max(keys)
        self._cu_queries, self._cu_keys = (cumulative(lengths, device) for lengths in (queries, keys))
        self._queries = torch.cat([torch.arange(start, end) for _, start, end in views]).to(device)
        self._keys = torch.cat([torch.arange(first, end) for first, _, end in views]).to(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        k, v, grouped = for_varlen(q, k[self._keys], v[self._keys])
        # The last query and the last key of a block are the same token.
        window = (-1, -1) if layer.window is None else (layer.window - 1, self._max_queries)
        lengths = (self._cu_queries, self._cu_keys, self._max_queries, self._max_keys)
        out = varlen_attn(q[self._queries], k, v, *lengths, scale=layer.scale, window_size=window, **grouped)
        assert isinstance(out, Tensor)
        return out


IMPLEMENTATION = "spmdrl"

# Arguments of transformers' attention functions that change the result in ways no kernel here implements.
_UNSUPPORTED = ("head_mask", "position_bias")


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
    softcap: float | None = None,
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
    layer = AttentionLayer(index=index, scale=scale, window=sliding_window, sinks=s_aux, softcap=softcap)
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
    return on_packed(causal)


def on_packed(causal: CausalAttention) -> Attend:
    """Return attention that takes and gives tensors as transformers' layers do."""

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
    seen whole. One that caps scores takes FlashAttention 2 on other devices, where it can be imported.
    """
    needs_torch = any(hasattr(module, "sinks") for module in model.modules())
    if isinstance(model, PreTrainedModel):
        family = vision_family(model.config)
        needs_torch |= family is not None and family.sees_whole_images
    is_hopper, caps = torch.cuda.get_device_capability()[0] == 9, score_cap(model) is not None
    faster: dict[Kernel, bool] = {"flash_attn_3": is_hopper, "flash_attn_2": caps}
    for kernel, is_faster in faster.items():
        with contextlib.suppress(UserError):
            if is_faster and not needs_torch:
                load_varlen(kernel)
                return kernel
    return "varlen"


def score_cap(model: nn.Module) -> float | None:
    """Return the soft cap of a model's attention scores; None for one without."""
    caps = (getattr(module, "attn_logit_softcapping", None) for module in model.modules())
    return next((cap for cap in caps if cap is not None), None)
