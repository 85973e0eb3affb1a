"""Sums within the sequences of a pack; each is the same wherever the sequence lies, and in whatever company."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_of_token(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64: which of the S sequences each token belongs to; cu_seqlens is [S+1]."""
    places = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    # With its size told, the device is not waited for.
    return places.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)


def sequence_sums(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S]: the sum of values [T] over each sequence's loss tokens; 0 where it has none."""
    of_token = sequence_of_token(cu_seqlens, len(values))
    return values.new_zeros(len(cu_seqlens) - 1).index_add(0, of_token, torch.where(loss_mask, values, 0.0))


def sequence_means(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T]: at each loss token the mean of values [T] over its sequence's loss tokens, elsewhere 0."""
    counts = sequence_sums(torch.ones_like(values), loss_mask, cu_seqlens)
    means = sequence_sums(values, loss_mask, cu_seqlens) / counts.clamp(min=1)
    return torch.where(loss_mask, means[sequence_of_token(cu_seqlens, len(values))], 0.0)


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
