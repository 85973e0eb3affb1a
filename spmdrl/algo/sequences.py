"""Sums within the sequences of a micro-batch; none depends on where its sequence lies, or next to which others."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64: which of the S sequences each token belongs to; cu_seqlens is [S+1]."""
    places = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    # With its size given, the device is not waited for.
    return places.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def on_tokens(values: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T]: the values of sequences, [S], on each of their tokens."""
    return values[sequence_of_token(cu_seqlens, num_tokens)]


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S]: the sum of values [T], which are floats, over each sequence; 0 for one without tokens."""
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens.long(), initial=0)


def sequence_means(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T]: at each loss token the mean of values [T] over its sequence's loss tokens, elsewhere 0."""
    counts = sequence_sums(loss_mask.to(values.dtype), cu_seqlens)
    means = sequence_sums(torch.where(loss_mask, values, 0.0), cu_seqlens) / counts.clamp(min=1)
    return torch.where(loss_mask, on_tokens(means, cu_seqlens, len(values)), 0.0)


def discounted_sums(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, decay: float) -> Tensor:
    """[T]: v_t + decay v_t' + decay^2 v_t'' + ... at loss tokens, t' and so on being the later ones of t's sequence.

    Elsewhere 0. Sums over 1, 2, 4, ... tokens, each made of two of the half length: log2(T) steps instead of T.
    """
    of_token = sequence_of_token(cu_seqlens, len(values))[loss_mask]
    sums, reach = values[loss_mask], 1
    while reach < len(sums):
        together = of_token[reach:] == of_token[:-reach]
        if not together.any():
            break
        later = torch.where(together, decay**reach * sums[reach:], 0.0)
        sums = sums + torch.nn.functional.pad(later, (0, reach))
        reach *= 2
    return torch.zeros_like(values).masked_scatter(loss_mask, sums)


def expert_imbalance(shares: Tensor, sequences: Tensor, loads: Tensor) -> Tensor:
    """Return [N] float32: of each token the sum over experts of its share [N, E] of them, by their load in its sequence
    over the mean load; 1 where loads are equal.

    sequences [N] int64 are the tokens' own, and loads [S, E] theirs, which carry no gradient. The mean over the tokens
    of a sequence is the balance loss of DeepSeek-V3 over its coefficient.
    """
    over_mean = loads * loads.shape[1] / loads.sum(-1, keepdim=True).clamp_min(1.0)
    return (over_mean[sequences] * shares).sum(-1)
