"""Per-token losses. They stay per token: `aggregation.token_weights` says what each counts in the global loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy loss of each token."""

    per_token: Tensor  # [T] float32, with grad; 0 outside loss_mask
    clipped: Tensor  # [T] bool, True where a bound decides the loss
    ratio: Tensor  # [T] float32, no grad; that of the token or of its sequence, 1 outside loss_mask
    means: dict[str, Tensor] = field(default_factory=dict)  # [T] each, no grad; reported as means over loss tokens


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far trainer and engine disagree about the same weights."""

    mismatch: Tensor  # [T] nats, old_logprobs - rollout_logprobs; 0 outside loss_mask

    @property
    def k1(self) -> Tensor:
        """[T] nats, rollout_logprobs - old_logprobs: estimates KL(engine || trainer), may be negative."""
        return -self.mismatch

    @property
    def k3(self) -> Tensor:
        """[T] nats, exp(mismatch) - 1 - mismatch: estimates KL(engine || trainer), never negative."""
        return torch.expm1(self.mismatch) - self.mismatch


def at_loss_tokens(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (logprobs - old_logprobs [T] nats, advantages [T]), both 0 outside loss_mask, whatever was there.

    Mask before exp, not after: exp(inf) * 0 is nan in the backward pass. So is 0 * an advantage that is not finite.
    """
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    return torch.where(loss_mask, logprobs - old_logprobs, 0.0), torch.where(loss_mask, advantages, 0.0)


def clip_both_sides(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return (max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A) [T], whether the clip decided it [T])."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(free, bounded), bounded > free


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Cross-entropy of each token, [T] nats: -logprobs where loss_mask, else 0. Both inputs are [T]."""
    return torch.where(loss_mask, -logprobs, 0.0)


def weighted_sum(per_token: Tensor, loss_weights: Tensor) -> Tensor:
    """Sum of per_token [T] times loss_weights [T], [] float32; over micro-batches and ranks it adds up to the loss."""
    return (per_token.float() * loss_weights.float()).sum()


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Mismatch:
    """Compare the trainer's log-probabilities of the sampled tokens with the engine's; all inputs are [T]."""
    return Mismatch(torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0))
