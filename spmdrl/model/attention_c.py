"""The functions behind `short_attention.py` in C, for float32 on a CPU; scores exist for a few queries at a time."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from spmdrl.model.attention_layer import SeenKeys
from spmdrl.model.compiled import Function, threads_for

_ATTEND = Function("attention", "attend", "pppppppiiiiiiiiiiifi")
_ATTEND_TO_CACHE = Function("attention", "attend_to_cache", "pppppiiiiiiiiiiiifi")
_ATTEND_NEWEST = Function("attention", "attend_newest", "pppppppppiiiiiiiiiiiffi")
_ATTEND_BACKWARD = Function("attention", "attend_backward", "ppppppppiiiiiiiiiiiiifi")


def attend(q: Tensor, k: Tensor, v: Tensor, seqlens: Sequence[int], scale: float) -> Tensor:
    """Causal attention within sequences: q [T, H, D], k and v [T, K, D] with K dividing H give [T, H, D]."""
    q, k, v = (_dense(x) for x in (q, k, v))
    out = q.new_empty(q.shape)
    strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    starts = _starts(seqlens)
    sizes = (len(seqlens), *_sizes(q, k), *strides, max(seqlens), scale, _threads(q, seqlens))
    _ATTEND(q, k, v, out, starts, starts, None, *sizes)
    return out


def attend_to_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first_row: int,
    seqlens: Sequence[int],
    earlier: Sequence[int],
    scale: float,
) -> Tensor:
    """Attend with the last seqlens[i] tokens of row first_row + i of a cache to all tokens of that row, which are
    earlier[i] more: q [T, H, D] over keys and values [rows, K, capacity, D] gives [T, H, D].

    The two caches have the same strides, and whole tokens are neighbours.
    """
    assert keys.stride() == values.stride() and keys.stride()[2:] == (keys.shape[3], 1)
    q, width = _dense(q), keys.shape[3]
    out = q.new_empty(q.shape)
    strides = (*q.stride()[:2], *2 * (width, keys.stride(1)))
    lengths = [before + length for before, length in zip(earlier, seqlens, strict=True)]
    row_starts = torch.arange(first_row, first_row + len(seqlens)) * (keys.stride(0) // width)
    sizes = (len(seqlens), q.shape[1], keys.shape[1], width, *strides, max(lengths), scale)
    threads = threads_for(q.shape[1] * width * sum(map(operator.mul, seqlens, lengths)) // 4)
    _ATTEND(q, keys, values, out, _starts(seqlens), row_starts, torch.tensor(earlier), *sizes, threads)
    return out


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, seqlens: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    grad, q, k, v = (_dense(x) for x in (grad, q, k, v))
    results = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    strides = [stride for x in (grad, q, k, v) for stride in x.stride()[:2]]
    sizes = (len(seqlens), *_sizes(q, k), *strides, max(seqlens), scale, _threads(q, seqlens))
    _ATTEND_BACKWARD(grad, q, k, v, *results, _starts(seqlens), *sizes)
    return results


def attend_to_cache(q: Tensor, keys: Tensor, values: Tensor, seen: SeenKeys, scale: float) -> Tensor:
    """Attend with the newest token of each row: q [n, H, D] over keys and values [n, K, L, D] give [n, H, D]."""
    q = _dense(q)
    keys, values = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (keys, values))
    out = q.new_empty(q.shape)
    strides = [stride for x in (q, keys, values) for stride in x.stride()[:2]]
    sizes = (len(q), q.shape[1], keys.shape[1], q.shape[2], *strides, seen.longest, seen.window or 0)
    threads = threads_for(q.numel() * seen.longest // 4)
    _ATTEND_TO_CACHE(q, keys, values, out, seen.lengths, *sizes, scale, threads)
    return out


def attend_newest(
    qkv: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    seen: SeenKeys,
    scale: float,
) -> Tensor:
    """Attend with the newest token of each row, and store its key and value: qkv [n, H + 2 K, D] gives [n, H, D].

    Queries and keys are normalized with `norms` [D], unless those are None, and rotated by the angles of cos and sin
    [n, D]. The two caches [rows, K, capacity, D] have the same strides, and whole tokens are neighbours.
    """
    assert keys.stride() == values.stride() and keys.stride()[2:] == (keys.shape[3], 1)
    num_rows, num_kv_heads, width = len(qkv), keys.shape[1], keys.shape[3]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qkv, cos, sin = qkv.contiguous(), _dense(cos), _dense(sin)
    out = qkv.new_empty(num_rows, num_heads, width)
    strides = (qkv.stride(0), cos.stride(0), sin.stride(0), *keys.stride()[:2])
    sizes = (num_rows, num_heads, num_kv_heads, width, *strides, seen.longest, seen.window or 0)
    threads = threads_for(out.numel() * seen.longest // 4)
    _ATTEND_NEWEST(qkv, *norms, cos, sin, keys, values, out, seen.lengths, *sizes, scale, eps, threads)
    return out


def _starts(seqlens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(seqlens)], dtype=torch.int64)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    return q.shape[1], k.shape[1], q.shape[2]


def _threads(q: Tensor, seqlens: Sequence[int]) -> int:
    return threads_for(q.shape[1] * q.shape[2] * sum(length * length for length in seqlens) // 4)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
