"""Attention over packed sequences by SGLang's kernels, to whom the pack is a cache with one token on each page.

FlashAttention 3 takes the same steps for a query whether it is one of many or decoded alone. SGLang's Triton kernels do
not: one is for prompts, and one for tokens that are decoded, so every query goes to the one that its token went to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from spmdrl.model import sglang_kernels as kernels
from spmdrl.model.two_passes import with_gradient_of

Backend = Literal["fa3", "triton"]
_SEEN = 2**24  # most keys, counted once for each query that sees them, that decoded tokens are given at the same time


def causal_as_engine(
    backend: Backend,
    seqlens: Sequence[int],
    cu_seqlens: Tensor,
    sampled: Tensor,
    plain: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """`CausalAttention` within each of the sequences that lie end to end; its gradient is that of `plain`, another.

    cu_seqlens is [S+1] int32, the offsets of seqlens; sampled [T] bool says which tokens an engine decoded one by one.
    """
    assert sinks is None and window is None, "no model that true_on_policy = true accepts has sinks or windows"

    def differentiable(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, k, v, scale=scale, window=None, sinks=None)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        if backend == "fa3":
            return _on_pages(seqlens, cu_seqlens, q, k, v, scale=scale)
        return _prompts_and_responses(cu_seqlens, sampled, q, k, v, scale=scale)

    out: Tensor = with_gradient_of(differentiable, exact, q, k, v)
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
    for some in _as_many_as_fit((response - starts + 1).tolist()):
        places = response[some]
        out[places] = _one_by_one(starts[some], places + 1, q[places], k, v, scale=scale)
    return out


def _counts(chosen: Tensor, cu_seqlens: Tensor) -> Tensor:
    """How many tokens of each sequence are `chosen` [T] bool: [S] int64."""
    running = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))
    return running[cu_seqlens.long()].diff()


def _at_once(places: Tensor, lengths: Tensor, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """The first tokens of each sequence, lengths [S] of them, at places [n] of the pack; q is [n, H, D]."""
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
    """Tokens that see the keys from starts [n] to ends [n] of the pack; q is [n, H, D]."""
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


def _as_many_as_fit(seen: Sequence[int]) -> Iterator[slice]:
    """Neighbouring tokens that together see no more keys than there should be at once, or one token alone."""
    start, total = 0, 0
    for token, keys in enumerate(seen):
        if token > start and total + keys > _SEEN:
            yield slice(start, token)
            start, total = token, 0
        total += keys
    if seen:
        yield slice(start, len(seen))
