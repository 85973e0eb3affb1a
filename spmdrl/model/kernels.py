"""Causal attention of one rank over packed sequences, by each of the kernels.

A sequence may have more keys than queries, because the queries also see earlier tokens: those on earlier ranks, under
context parallelism, or those of the nodes above, in a prefix tree. Its last query and last key are the same token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, zip_longest
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.attention_layer import AttentionLayer, CausalAttention, attention_in_parts, prepend_sink
from spmdrl.model.cpu_room import cpu_room
from spmdrl.model.exact.invariant import causal_in_tiles
from spmdrl.model.exact.sglang_kernels import causal_as_engine
from spmdrl.model.plain_attention import ScoreRule, attend
from spmdrl.types import UserError

Kernel = Literal["sdpa", "varlen", "flash_attn_2", "flash_attn_3", "invariant", "sglang_fa3", "sglang_triton"]


# Of FlashAttention 2 and 3.
_HEAD_STEP, _MAX_HEAD = 8, 256


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """The division of T queries, and of as many keys or more, into S packed sequences."""

    seqlens: list[int]  # [S] queries of each sequence
    cu_seqlens: Tensor  # [S+1] int32, the same lengths as offsets, on the device of the tokens
    earlier: Sequence[int] = ()  # keys before the first query, of the first sequences or all; others have none
    sampled: Tensor | None = None  # [T] bool, tokens that an engine decoded one by one; only its own kernels read it

    @property
    def key_lengths(self) -> list[int]:
        """Keys of each sequence, [S]."""
        return [queries + more for queries, more in zip_longest(self.seqlens, self.earlier, fillvalue=0)]


def causal_attention(layout: SequenceLayout, kernel: Kernel) -> CausalAttention:
    """Let each query see the keys of its own sequence, up to its own token."""
    in_runs = functools.partial(_sdpa_in_runs, layout)
    if kernel == "sdpa":
        return in_runs
    if kernel == "invariant":
        return functools.partial(causal_in_tiles, layout.seqlens, sum(layout.earlier), in_runs)
    if kernel == "sglang_fa3" or kernel == "sglang_triton":
        assert not layout.earlier and layout.sampled is not None, "an engine's kernels need whole rollouts"
        return functools.partial(
            causal_as_engine,
            "fa3" if kernel == "sglang_fa3" else "triton",
            layout.seqlens,
            layout.cu_seqlens,
            layout.sampled,
            causal_attention(layout, "varlen"),
        )
    offsets = offsets_of(layout.seqlens, layout.key_lengths, layout.cu_seqlens)
    flash = functools.partial(load_varlen(kernel), offsets)
    return lambda q, k, v, layer: (flash if has_flash(kernel, q.shape[-1], layer) else in_runs)(q, k, v, layer)


def has_flash(kernel: Kernel, head_dim: int, layer: AttentionLayer) -> bool:
    """Return True when a CUDA kernel can compute a layer whose heads have this size; sdpa can compute any."""
    caps = kernel == "varlen" and layer.softcap is not None  # torch's kernel cannot
    return head_dim % _HEAD_STEP == 0 and head_dim <= _MAX_HEAD and not caps


def refuse_sinks(kernel: Kernel, layer: AttentionLayer) -> None:
    """Raise UserError for a layer with attention sinks, which this kernel cannot compute."""
    if layer.sinks is not None:
        raise UserError(
            f'model.attention = "{kernel}" has no attention sinks, and this model uses them; '
            'set it to "auto", "varlen" or "sdpa"'
        )


# --- sdpa ------------------------------------------------------------------------------------------------------------


def _runs(layout: SequenceLayout) -> Iterator[tuple[slice, slice, int]]:
    """Yield (queries, keys, number of sequences) for each run of sequences with equal numbers of queries and keys."""
    end_query = end_key = 0
    for (queries, keys), run in groupby(zip(layout.seqlens, layout.key_lengths, strict=True)):
        count = sum(1 for _ in run)
        first_query, first_key = end_query, end_key
        end_query, end_key = first_query + count * queries, first_key + count * keys
        yield slice(first_query, end_query), slice(first_key, end_key), count


def _sdpa_in_runs(layout: SequenceLayout, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """Call sdpa once for each run of sequences of equal length; the room for a CPU has more for short ones."""
    room = cpu_room() if q.device.type == "cpu" else None
    if room is not None and q.dtype == torch.float32 and layer.is_plain and not any(layout.earlier):
        return room.attend_packed(q, k, v, layout.seqlens, layer, _sdpa_run)
    outputs = [_sdpa_run(q[queries], k[keys], v[keys], count, layer) for queries, keys, count in _runs(layout)]
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _sdpa_run(q: Tensor, k: Tensor, v: Tensor, count: int, layer: AttentionLayer) -> Tensor:
    """Attention of `count` sequences of equal length: q [tokens, H, D], k and v [keys, K, D] give [tokens, H, D]."""
    # The batch is a view: heads come after tokens in memory.
    query, key, value = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    return _causal_sdpa(query, key, value, layer).transpose(1, 2).flatten(0, 1)


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    """q [n, H, queries, D], k and v [n, K, keys, D]."""
    if layer.softcap is not None:
        assert layer.sinks is None, "no model that caps scores has attention sinks"
        return attend(q, k, v, ScoreRule(layer.scale, layer.softcap, layer.window))[0]
    visible = _visible(q.shape[2], k.shape[2], layer.window, q.device)
    if layer.sinks is None:
        return _sdpa(q, k, v, visible, layer.scale)
    if visible is not None:
        visible = F.pad(visible, (1, 0, 1, 0), value=True)
    return _sdpa(*prepend_sink(q, k, v, layer.sinks / layer.scale), visible, layer.scale)[:, :, 1:, :-1]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=grouped
    )


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Mask [queries, keys] bool of the keys that each query sees; None where the faster `is_causal` means the same."""
    if queries == keys and (window is None or window >= keys):
        return None
    token = torch.arange(keys, device=device)
    distance = token[keys - queries :, None] - token
    return (distance >= 0) & (distance < (keys if window is None else window))


# --- CUDA kernels ----------------------------------------------------------------------------------------------------


class Offsets(NamedTuple):
    """A layout's offsets, in the order of the kernels' arguments."""

    cu_queries: Tensor  # [S+1] int32
    cu_keys: Tensor  # [S+1] int32
    max_queries: int
    max_keys: int


def offsets_of(queries: list[int], keys: list[int], cu_queries: Tensor) -> Offsets:
    """Return the offsets of sequences with these numbers of queries and keys; `cu_queries` says where they are."""
    cu_keys = cu_queries if keys == queries else cumulative(keys, cu_queries.device)
    return Offsets(cu_queries, cu_keys, max(queries), max(keys))


def cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return lengths [S] as offsets [S+1] int32."""
    return torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)


def window_size(layer: AttentionLayer) -> tuple[int, int]:
    """Return how many tokens (before, after) itself a token sees, as CUDA kernels count them; -1 is all."""
    return (-1, 0) if layer.window is None else (layer.window - 1, 0)


def load_varlen(kernel: Kernel) -> Callable[..., Tensor]:
    """Load a CUDA kernel as a `CausalAttention` that takes Offsets first. Raises UserError when it is not installed.

    All of these kernels align the last query with the last key where a sequence has more keys than queries.
    """
    try:
        if kernel == "varlen":
            from torch.nn.attention.varlen import varlen_attn

            return functools.partial(_torch_varlen, varlen_attn)
        if kernel == "flash_attn_2":
            from flash_attn import flash_attn_varlen_func
        else:
            from flash_attn_interface import flash_attn_varlen_func
    except ImportError as error:
        raise UserError(f'model.attention = "{kernel}" needs a package that is not installed ({error})') from error
    return functools.partial(_flash_attn, flash_attn_varlen_func, kernel)


def _flash_attn(
    run: Callable[..., Any], kernel: Kernel, offsets: Offsets, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer
) -> Tensor:
    refuse_sinks(kernel, layer)
    out: Tensor | tuple[Tensor, ...] = run(
        q,
        k,
        v,
        *offsets,
        softmax_scale=layer.scale,
        causal=True,
        window_size=window_size(layer),
        **({} if layer.softcap is None else {"softcap": layer.softcap}),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[0] if isinstance(out, tuple) else out  # FlashAttention 3 returned log-sums as well, up to mid-2025


def _torch_varlen(
    run: Callable[..., Any], offsets: Offsets, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer
) -> Tensor:
    k, v, grouped = for_varlen(q, k, v)
    if layer.sinks is not None:
        return attention_in_parts(q, k, v, layer.sinks, FlashWithNormalizer(offsets, layer))
    out: Tensor = run(q, k, v, *offsets, scale=layer.scale, window_size=window_size(layer), **grouped)
    return out


def for_varlen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return keys and values as `varlen_attn` takes them with these queries, and its argument about their heads."""
    groups = q.shape[1] // k.shape[1]
    if groups == 1 or varlen_takes_groups():
        return k, v, {"enable_gqa": True} if groups > 1 else {}
    return k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), {}


@functools.cache
def varlen_takes_groups() -> bool:
    """Return False where keys and values are repeated for each query head: torch 2.11 and 2.12 have no `enable_gqa`."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class FlashWithNormalizer:
    """torch's flash kernel with its normalizer; `varlen_attn` itself can only differentiate the output."""

    offsets: Offsets
    layer: AttentionLayer
    sees_all: bool = False  # queries see all keys of their sequence, and not only earlier ones

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self.offsets, 0.0, self._is_causal(), False, **self._options()
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The kernel demands the random state of dropout, though none is used.
        random = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *self.offsets, 0.0, self._is_causal(), *random, **self._options()
        )

    def _is_causal(self) -> bool:
        return self.layer.window is None and not self.sees_all

    def _options(self) -> dict[str, Any]:
        before, after = (-1, -1) if self.sees_all else window_size(self.layer)
        return {"scale": self.layer.scale, "window_size_left": before, "window_size_right": after}
