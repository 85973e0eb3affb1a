"""Stand-ins for SGLang's CUDA kernels: what each of them computes, in another order, each token as if it were alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.exact import invariant, sglang_kernels
from spmdrl.model.kernels import SequenceLayout, causal_attention
from spmdrl.model.linear import linear_by


def use(patch: pytest.MonkeyPatch) -> None:
    """Let `spmdrl.model.exact.sglang_kernels` work without a GPU, for as long as the patch lasts."""
    for function in (product, mean, log_softmax, rotate, attend_paged, attend_at_once, attend_one_by_one):
        patch.setattr(sglang_kernels, function.__name__, function)
    # Gradients go through a kernel that needs a GPU as well.
    patch.setattr("spmdrl.model.kernels.load_varlen", lambda _: _varlen)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_by(_product, x, weight, bias)


def silu(x: Tensor, inplace: bool = False) -> Tensor:
    return invariant.silu(x)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, None], sin[:, None]
    one, other = x.split(x.shape[-1] // 2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


def attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
) -> Tensor:
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert k.shape[1] == v.shape[1] == 1 and max_seqlen_q == page_table.shape[1] == int(cache_seqlens.max())
    out = torch.empty_like(q)
    for row, (start, end) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
        pages = page_table[row, : int(cache_seqlens[row])]
        for query in range(start, end):
            seen = pages[: len(pages) - end + query + 1]
            out[query] = _attended(q[query], k[seen, 0], v[seen, 0], softmax_scale)
    return out


def attend_at_once(
    q: Tensor,
    out: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor,
    max_len_extend: int,
) -> None:
    for row, prefix in enumerate(prefix_lens.tolist()):
        start, end = qo_indptr[row : row + 2].tolist()
        assert end - start <= max_len_extend
        keys = kv_indices[kv_indptr[row] : kv_indptr[row + 1]]
        for query in range(start, end):
            seen = keys[: prefix + query - start + 1]
            out[query] = _attended(q[query], k[seen], v[seen], scale)


def attend_one_by_one(
    q: Tensor, out: Tensor, k: Tensor, v: Tensor, *, scale: float, kv_indptr: Tensor, kv_indices: Tensor
) -> None:
    assert kv_indptr.dtype == torch.int32 and int(kv_indptr[-1]) == len(kv_indices)
    for query in range(len(q)):
        seen = kv_indices[kv_indptr[query] : kv_indptr[query + 1]]
        out[query] = _attended(q[query], k[seen], v[seen], scale)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: None, enable_gqa: bool, scale: float, is_causal: bool
) -> Tensor:
    """torch's, of the last queries [1, H, n, D] of a sequence over its keys [1, K, L, D]; always causal."""
    keys, values = (x[0].transpose(0, 1) for x in (k, v))
    first = k.shape[2] - q.shape[2] + 1
    rows = [_attended(q[0, :, i], keys[: first + i], values[: first + i], scale) for i in range(q.shape[2])]
    return torch.stack(rows, dim=1)[None]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, and rounded: not every processor has products in bfloat16."""
    return invariant.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def _attended(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One query [H, D] over keys and values [L, K, D]."""
    groups = q.shape[0] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    weights = (torch.einsum("hd,lhd->hl", q.float(), k) * scale).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, v).to(q.dtype)


def _varlen(offsets: Any, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
    seqlens = offsets.cu_queries.diff().tolist()
    return causal_attention(SequenceLayout(seqlens, offsets.cu_queries), "sdpa")(q, k, v, layer)


def in_portions_of(patch: pytest.MonkeyPatch, num_keys: int) -> None:
    """Let decoded tokens be given to their kernel a few at a time."""
    patch.setattr(sglang_kernels, "_MAX_PAIRS", num_keys)
