"""Stand-ins for CUDA's attention kernels, for tests on a CPU: they take the same arguments and mean the same by them.

To import this module is to give torch's operators of the kernel behind `varlen_attn` a CPU implementation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _sequences(cu_queries: Tensor, cu_keys: Tensor, max_queries: int, max_keys: int) -> Iterator[tuple[slice, slice]]:
    assert cu_queries.dtype == cu_keys.dtype == torch.int32
    assert (int(cu_queries.diff().max()), int(cu_keys.diff().max())) == (max_queries, max_keys)
    for queries, keys in zip(pairwise(cu_queries.tolist()), pairwise(cu_keys.tolist()), strict=True):
        yield slice(*queries), slice(*keys)


def _bias(queries: slice, keys: slice, is_causal: bool, left: int, right: int) -> Tensor:
    """0 where a query sees a key and -inf elsewhere; the last query and the last key are the same token."""
    num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
    ahead = torch.arange(num_keys) - torch.arange(num_keys - num_queries, num_keys)[:, None]
    hidden = ((left >= 0) & (ahead < -left)) | ((right >= 0) & (ahead > right)) | (is_causal & (ahead > 0))
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


def _rows(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    **others: Any,
) -> tuple[Tensor, ...]:
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "as the kernels demand"
    assert q.shape[1] % k.shape[1] == 0 and len(q) == cu_queries[-1] and len(k) == len(v) == cu_keys[-1]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for queries, keys in _sequences(cu_queries, cu_keys, max_queries, max_keys):
        bias = _bias(queries, keys, is_causal, window_size_left, window_size_right)
        of_heads, normalizers = _FORWARD(*_rows(q[queries], k[keys], v[keys]), attn_mask=bias, scale=scale)
        out[queries], lse[:, queries] = of_heads[0].transpose(0, 1), normalizers[0]
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    dropout: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
) -> tuple[Tensor, ...]:
    shapes = [(len(x), x.shape[1], -1, x.shape[2]) for x in (q, k, v)]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for queries, keys in _sequences(cu_queries, cu_keys, max_queries, max_keys):
        bias = _bias(queries, keys, is_causal, window_size_left, window_size_right)
        rows = _rows(grad[queries], q[queries], k[keys], v[keys], out[queries])
        found = _BACKWARD(*rows, lse[None, :, queries].contiguous(), 0.0, False, attn_mask=bias, scale=scale)
        for whole, tokens, part in zip(grads, (queries, keys, keys), found, strict=True):
            whole[tokens] = part[0].transpose(0, 1)
    return tuple(x.view(shape).sum(2) for x, shape in zip(grads, shapes, strict=True))  # of each group of heads


_ON_CPU = torch.library.Library("aten", "IMPL")
_ON_CPU.impl("_flash_attention_forward", _forward, "CPU")
_ON_CPU.impl("_flash_attention_backward", _backward, "CPU")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float = 0.0,
    deterministic: bool,
) -> Tensor:
    """flash-attn's function, which takes grouped heads and says by itself whether it is causal."""
    assert causal and deterministic == torch.are_deterministic_algorithms_enabled()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    if softcap:
        outputs = []
        for queries, keys in _sequences(cu_queries, cu_keys, max_queries, max_keys):
            query, key, value = (x.transpose(0, 1) for x in (q[queries], k[keys], v[keys]))
            scores = (query @ key.mT * softmax_scale / softcap).tanh() * softcap
            weights = (scores + _bias(queries, keys, True, window_size[0], 0)).softmax(-1)
            outputs.append((weights @ value).transpose(0, 1))
        return torch.cat(outputs)
    return varlen_attn(
        q, k, v, cu_queries, cu_keys, max_queries, max_keys, scale=softmax_scale, window_size=(window_size[0], 0)
    )
