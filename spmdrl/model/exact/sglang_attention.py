"""Attention over packed sequences by SGLang's kernels, with the bits of the engine.

FlashAttention 3 computes a query in the same steps whether it is one of many or decoded alone; it reads the micro-batch
as a cache with one token on each page. SGLang's Triton backend has one kernel for prompts and another for decoded
tokens, so every query is computed by the kernel that computed its token in the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from spmdrl.model.attention_layer import AttentionLayer, CausalAttention
from spmdrl.model.exact import sglang_kernels as kernels
from spmdrl.model.exact.custom_backward import with_backward_of

Backend = Literal["fa3", "triton"]
_MAX_PAIRS = 2**24  # pairs of a decoded token and a key it sees that one kernel call may have


def causal_as_engine(
    backend: Backend,
    seqlens: Sequence[int],
    cu_seqlens: Tensor,
    sampled: Tensor,
    plain: CausalAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: AttentionLayer,
) -> Tensor:
    """`CausalAttention` with the engine's bits; gradients are those of `plain`.

    cu_seqlens is [S+1] int32, the offsets of seqlens; sampled [T] bool marks the tokens that the engine decoded.
    """
    has_extras = layer.sinks is not None or layer.window is not None
    assert not has_extras, "no model that true_on_policy = true accepts has sinks or windows"

    def differentiable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, layer)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        if backend == "fa3":
            return _on_pages(seqlens, cu_seqlens, q, k, v, scale=layer.scale)
        return _prompts_and_responses(cu_seqlens, sampled, q, k, v, scale=layer.scale)

    out: Tensor = with_backward_of(differentiable, exact, q, k, v)
    return out


def _on_pages(seqlens: Sequence[int], cu_seqlens: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    longest = max(seqlens)
    places = torch.arange(longest, dtype=torch.int32, device=q.device)
    pages = torch.minimum(cu_seqlens[:-1, None] + places, cu_seqlens[1:, None] - 1)  # [S, longest]
    return kernels.attend_paged(
        q,
        k[:, None],
        v[:, None],
        page_table=pages,
        cache_seqlens=cu_seqlens.diff(),
        cu_seqlens_q=cu_seqlens,
        max_seqlen_q=longest,
        softmax_scale=scale,
    )


def _prompts_and_responses(
    cu_seqlens: Tensor, sampled: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float
) -> Tensor:
    out = torch.empty_like(q)
    prompt, response = (places[:, 0] for places in (torch.nonzero(~sampled), torch.nonzero(sampled)))
    if len(prompt):
        out[prompt] = _at_once(prompt, _counts(~sampled, cu_seqlens), q[prompt], k, v, scale=scale)
    starts = cu_seqlens[torch.searchsorted(cu_seqlens, response, right=True) - 1].long()
    for part in _parts_within_limit((response - starts + 1).tolist()):
        places = response[part]
        out[places] = _one_by_one(starts[part], places + 1, q[places], k, v, scale=scale)
    return out


def _counts(chosen: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Count the tokens of each sequence that `chosen` [T] bool marks: [S] int64."""
    running = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
    return running[cu_seqlens.long()].diff()


def _at_once(places: Tensor, lengths: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attend with the first lengths [S] tokens of each sequence, at places [n] of the micro-batch; q is [n, H, D]."""
    out = torch.empty_like(q)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    kernels.attend_at_once(
        q,
        out,
        k,
        v,
        scale=scale,
        qo_indptr=ends,
        kv_indptr=ends,
        kv_indices=places,
        prefix_lens=torch.zeros(len(lengths), dtype=torch.int32, device=q.device),
        max_len_extend=int(lengths.max()),
    )
    return out


def _one_by_one(starts: Tensor, ends: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Attend with tokens that see the keys from starts [n] to ends [n] of the micro-batch; q is [n, H, D]."""
    out = torch.empty_like(q)
    lengths = ends - starts
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    skipped = (starts - offsets[:-1]).repeat_interleave(lengths)
    kernels.attend_one_by_one(
        q,
        out,
        k,
        v,
        scale=scale,
        kv_indptr=offsets.int(),
        kv_indices=skipped + torch.arange(len(skipped), device=q.device),
    )
    return out


def _parts_within_limit(num_keys: Sequence[int]) -> Iterator[slice]:
    """Split tokens that see `num_keys` keys each into runs within _MAX_PAIRS; a single token may exceed it."""
    start, total = 0, 0
    for token, keys in enumerate(num_keys):
        if token > start and total + keys > _MAX_PAIRS:
            yield slice(start, token)
            start, total = token, 0
        total += keys
    if num_keys:
        yield slice(start, len(num_keys))
