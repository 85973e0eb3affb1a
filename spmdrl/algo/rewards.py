"""Rewards before they become advantages: what length costs, and which token is rewarded with what."""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algo.segments import discounted_sums


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to max_tokens - buffer_tokens, falling linearly to -1 at max_tokens: DAPO arXiv:2503.14476, equation 13."""
    over = num_tokens - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, over / buffer_tokens))


def with_final_rewards(penalties: Tensor, rewards: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Token rewards [T]: penalties [T] at loss tokens, plus each sequence's reward at its last; 0 elsewhere.

    rewards [T] are alike on all tokens of a sequence, whose S + 1 offsets are cu_seqlens.
    """
    after = discounted_sums(loss_mask.to(penalties.dtype), loss_mask, cu_seqlens, decay=1.0)  # loss tokens from here on
    return torch.where(loss_mask, penalties, 0.0) + torch.where(after == 1, rewards, 0.0)
