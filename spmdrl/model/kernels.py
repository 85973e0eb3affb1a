"""Causal attention of one rank within sequences that lie end to end, by each of the kernels.

A rank may hold only the end of its first sequence as queries, and all keys that these see. So a sequence's last query
and last key are the same token, and the first sequence may have more keys than queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.model.invariant_attention import causal_in_tiles
from spmdrl.model.sglang_attention import causal_as_engine
from spmdrl.model.sinks import attention_with_sinks, behind_a_sink
from spmdrl.types import UserError

Kernel = Literal["sdpa", "varlen", "flash_attn_2", "flash_attn_3", "invariant", "sglang_fa3", "sglang_triton"]


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Where the T queries lie, and the earlier + T keys; earlier ones belong to the first sequence."""

    seqlens: list[int]  # [S] queries of each sequence
    cu_seqlens: Tensor  # [S+1] int32, the same as offsets, on the device of the tokens
    earlier: int = 0  # keys before the first query
    sampled: Tensor | None = None  # [T] bool, tokens that an engine decoded one by one; of use to its kernels only


class CausalAttention(Protocol):
    """q is [T, H, D], k and v [earlier + T, K, D] with K dividing H; the result is [T, H, D].

    A window of w lets a token see itself and w - 1 before it. Sinks are [H]; sinks.py says what they do.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None
    ) -> Tensor: ...


def causal_attention(layout: SequenceLayout, kernel: Kernel) -> CausalAttention:
    """Each query sees the keys of its own sequence up to its own token."""
    if kernel == "sdpa":
        return functools.partial(_sdpa_in_runs, layout)
    if kernel == "invariant":
        assert not layout.earlier, "true_on_policy = true was not refused with parallel.cp"
        return functools.partial(causal_in_tiles, layout.seqlens, functools.partial(_sdpa_in_runs, layout))
    if kernel == "sglang_fa3" or kernel == "sglang_triton":
        assert not layout.earlier and layout.sampled is not None, "an engine's kernels see whole rollouts"
        return functools.partial(
            causal_as_engine,
            "fa3" if kernel == "sglang_fa3" else "triton",
            layout.seqlens,
            layout.cu_seqlens,
            layout.sampled,
            causal_attention(layout, "varlen"),
        )
    return functools.partial(load_varlen(kernel), _offsets(layout))


def refuse_sinks(kernel: Kernel, sinks: Tensor | None) -> None:
    if sinks is not None:
        raise UserError(
            f'model.attention = "{kernel}" has no attention sinks, and this model uses them; '
            'set it to "auto", "varlen" or "sdpa"'
        )


# --- sdpa ------------------------------------------------------------------------------------------------------------


def runs_of_equal_length(seqlens: list[int], start: int = 0) -> Iterator[tuple[slice, int, int]]:
    """(tokens, sequences, tokens of each) of every run of neighbours of equal length among sequences end to end.

    Packing sorts by length, so runs are long. The first sequence begins at token `start`.
    """
    for length, run in groupby(seqlens):
        count = sum(1 for _ in run)
        yield slice(start, start + count * length), count, length
        start += count * length


def _runs(layout: SequenceLayout) -> Iterator[tuple[slice, slice, int]]:
    """(queries, keys, sequences) of every run of neighbours of equal lengths."""
    start, rest = 0, layout.seqlens
    if layout.earlier:
        start, *rest = layout.seqlens
        yield slice(0, start), slice(0, layout.earlier + start), 1
    for tokens, count, _ in runs_of_equal_length(rest, start):
        yield tokens, slice(layout.earlier + tokens.start, layout.earlier + tokens.stop), count


def _sdpa_in_runs(
    layout: SequenceLayout, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None
) -> Tensor:
    """One batched call for each run."""
    outputs = []
    for queries, keys, count in _runs(layout):
        # Heads last in memory, so that a run of sequences is a view.
        batch = [x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q[queries], k[keys], v[keys])]
        outputs.append(_causal_sdpa(*batch, scale=scale, window=window, sinks=sinks).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    """q [n, H, queries, D], k and v [n, K, keys, D]."""
    visible = _visible(q.shape[2], k.shape[2], window, q.device)
    if sinks is None:
        return _sdpa(q, k, v, visible, scale)
    if visible is not None:
        visible = F.pad(visible, (1, 0, 1, 0), value=True)
    return _sdpa(*behind_a_sink(q, k, v, sinks / scale), visible, scale)[:, :, 1:, :-1]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=grouped
    )


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which queries see which keys, [queries, keys] bool; None where `is_causal`, which is faster, says as much."""
    if queries == keys and (window is None or window >= keys):
        return None
    token = torch.arange(keys, device=device)
    distance = token[keys - queries :, None] - token
    return (distance >= 0) & (distance < (keys if window is None else window))


# --- CUDA kernels ----------------------------------------------------------------------------------------------------


class _Offsets(NamedTuple):
    """A layout in the order in which kernels take it."""

    cu_queries: Tensor  # [S+1] int32, as cu_seqlens
    cu_keys: Tensor
    max_queries: int
    max_keys: int


def _offsets(layout: SequenceLayout) -> _Offsets:
    cu_keys = F.pad(layout.cu_seqlens[1:] + layout.earlier, (1, 0))
    longest = max(layout.seqlens)
    return _Offsets(layout.cu_seqlens, cu_keys, longest, max(longest, layout.earlier + layout.seqlens[0]))


def sees(window: int | None) -> tuple[int, int]:
    """How far back and ahead of itself a token sees, as kernels count it."""
    return (-1, 0) if window is None else (window - 1, 0)


def load_varlen(kernel: Kernel) -> Callable[..., Tensor]:
    """A CUDA kernel as `CausalAttention` with _Offsets in front. Raises UserError when it is not installed.

    All of them let a sequence's last query see up to its last key, however many more keys than queries there are.
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
    run: Callable[..., Any],
    kernel: Kernel,
    offsets: _Offsets,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    refuse_sinks(kernel, sinks)
    deterministic = torch.are_deterministic_algorithms_enabled()
    out: Tensor = run(
        q, k, v, *offsets, softmax_scale=scale, causal=True, window_size=sees(window), deterministic=deterministic
    )
    return out


def _torch_varlen(
    run: Callable[..., Any],
    offsets: _Offsets,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    # Repeated, not enable_gqa: torch 2.11 has no such argument.
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    if sinks is not None:
        return attention_with_sinks(q, k, v, sinks, _FlashWithNormalizer(offsets, scale, sees(window)))
    out: Tensor = run(q, k, v, *offsets, scale=scale, window_size=sees(window))
    return out


@dataclass(frozen=True, slots=True)
class _FlashWithNormalizer:
    """torch's flash kernel, of which `varlen_attn` differentiates only the output."""

    offsets: _Offsets
    scale: float
    sees: tuple[int, int]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self.offsets, 0.0, self.sees == (-1, 0), False, **self._shape()
        )
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        # The random state of a dropout that there is not.
        random = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *self.offsets, 0.0, self.sees == (-1, 0), *random, **self._shape()
        )

    def _shape(self) -> dict[str, Any]:
        return {"scale": self.scale, "window_size_left": self.sees[0], "window_size_right": self.sees[1]}
