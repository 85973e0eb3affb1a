"""SGLang's own kernels, for a trainer whose forward pass must have the bits of its engine's.

These are the functions that the pinned SGLang calls under `rl_on_policy_target = "fsdp"`; sglang_operators.py calls
them with the same arguments. They need a CUDA device. Nothing of the engine itself is imported, and torch's own
operators are not replaced in this process, as SGLang replaces them in its own. Attention over packed sequences is here
too, with the bits of the engine (`causal_as_engine`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from spmdrl.algo.packing import neighbours_within
from spmdrl.model.attention_layer import AttentionLayer, CausalAttention
from spmdrl.model.linear import with_backward_of

# The environment of the engine's processes. Products use the kernel whose tiles are the same for every shape, and a
# decoded token's keys are summed in one go, not in parts whose size depends on the longest context. The other values
# are SGLang's defaults, set here so that variables which the user exports for another engine do not change this one.
ENVIRONMENT = {
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_DEEPGEMM": "0",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "0",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "1",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
    "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE": str(2**20),
    "SGLANG_USE_SGL_FA3_KERNEL": "1",
}


@functools.cache
def _operators() -> ModuleType:
    from sglang.srt.batch_invariant_ops import batch_invariant_ops

    return batch_invariant_ops


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in the dtype of x [N, D]: weight is [V, D], bias [V], the result [N, V]. Sums are float32."""
    # SGLang has two kernels; this one does not choose its tiles by shape.
    out: Tensor = _operators()._matmul_persistent_triton(x.contiguous(), weight.t(), x.dtype, bias)
    return out


def mean(x: Tensor) -> Tensor:
    """Mean over the last dimension, which stays, with size 1: x [..., N] gives [..., 1]."""
    out: Tensor = _operators().mean_dim(x.contiguous(), -1, keepdim=True)
    return out


def log_softmax(logits: Tensor) -> Tensor:
    """log_softmax over the last dimension of logits [N, V], computed in float32 and rounded to their dtype."""
    out: Tensor = _operators().log_softmax(logits, -1)
    return out


@functools.cache
def _rotate() -> Callable[..., Tensor]:
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    compiled: Callable[..., Tensor] = torch.compile(dynamic=True)(apply_rotary_emb)  # as the engine does
    return compiled


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, H, D], rotating its two halves against each other by cos and sin [T, D / 2]."""
    # Detached: torch recompiles for inputs that require gradients, and stops compiling after eight times. Code that is
    # not compiled rounds differently.
    return _rotate()(x.detach(), cos, sin, True)


def attend_paged(q: Tensor, k: Tensor, v: Tensor, **layout: Any) -> Tensor:
    """FlashAttention 3 over a cache in pages: q [T, H, D], k and v [N, 1, K, D] of N pages; gives [T, H, D]."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    out: Tensor = flash_attn_with_kvcache(q=q, k_cache=k, v_cache=v, causal=True, num_splits=1, **layout)
    return out


def attend_at_once(q: Tensor, out: Tensor, k: Tensor, v: Tensor, *, scale: float, **layout: Any) -> None:
    """The Triton kernel for prompts: q [T, H, D] into out, over k and v [N, K, D]."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified

    extend_attention_fwd_unified(q, out, k, v, 1.0, 1.0, sm_scale=scale, **layout)


def attend_one_by_one(q: Tensor, out: Tensor, k: Tensor, v: Tensor, *, scale: float, **layout: Any) -> None:
    """The Triton kernel for decoded tokens: each of q [n, H, D] into out, over k and v [N, K, D]."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    num_tokens, num_heads, head_dim = q.shape
    # Workspace: the kernel stores the result of each part of the keys before it merges them, and there is one part.
    weighted = torch.empty(num_tokens, num_heads, 1, head_dim, dtype=torch.float32, device=q.device)
    normalizers = torch.empty(num_tokens, num_heads, 1, dtype=torch.float32, device=q.device)
    num_parts = torch.ones(num_tokens, dtype=torch.int32, device=q.device)
    decode_attention_fwd(
        q,
        k,
        v,
        out,
        attn_logits=weighted,
        attn_lse=normalizers,
        num_kv_splits=num_parts,
        max_kv_splits=1,
        sm_scale=scale,
        k_scale=1.0,
        v_scale=1.0,
        **layout,
    )


# Attention over packed sequences, with the bits of the engine.
#
# FlashAttention 3 computes a query in the same steps whether it is one of many or decoded alone; it reads the
# micro-batch as a cache with one token on each page. SGLang's Triton backend has one kernel for prompts and another for
# decoded tokens, so every query is computed by the kernel that computed its token in the engine.

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
    return attend_paged(
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
    for part in neighbours_within((response - starts + 1).tolist(), _MAX_PAIRS):
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
    attend_at_once(
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
    attend_one_by_one(
        q,
        out,
        k,
        v,
        scale=scale,
        kv_indptr=offsets.int(),
        kv_indices=skipped + torch.arange(len(skipped), device=q.device),
    )
    return out
