"""Corrections for sampling with one program and training with another: weights, rejections and masks, as pure maths.

The engine sampled a token with probability exp(b), the trainer computes exp(o) with the same weights, and the mismatch
is s = o - b: `old_logprobs - rollout_logprobs`. Tensors are [T], laid out by cu_seqlens [S+1]; values outside loss_mask
have no effect. Nothing here carries a gradient. `docs/agreement.md` says what each does to the loss's denominator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spmdrl.algo.sequences import on_tokens, sequence_sums


def log_weights(mismatch: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, level: str) -> Tensor:
    """[T] float64, nats: the logarithm of each loss token's importance weight; 0 outside loss_mask.

    - "token": s of the token.
    - "sequence": the sum of s over the sequence's loss tokens: the weight of the whole response, on each of them.
    - "geometric": their mean: a weight that does not grow with the response's length.
    """
    seen = torch.where(loss_mask, mismatch.detach().double(), 0.0)
    if level == "token":
        return seen
    whole = sequence_sums(seen, cu_seqlens)
    match level:
        case "geometric":
            whole = whole / sequence_sums(loss_mask.double(), cu_seqlens).clamp(min=1)
        case "sequence":
            pass
        case _:
            raise ValueError(f'unknown correction level "{level}"')
    return torch.where(loss_mask, on_tokens(whole, cu_seqlens, len(mismatch)), 0.0)


def outside(log_weight: Tensor, *, low: float, high: float) -> Tensor:
    """[T] bool, True where the weight is below low or above high; a weight that is nan is neither."""
    weight = log_weight.exp()
    return (weight < low) | (weight > high)


def bounded_weights(log_weight: Tensor, *, mode: str, low: float, high: float) -> Tensor:
    """[T] float64: importance weights w = exp(log_weight) that cannot run away.

    - "truncate": min(w, high), truncated importance sampling: Ionides 2008, doi:10.1198/106186008X320456; for this
      mismatch Yao et al. 2025, https://fengyao.notion.site/off-policy-rl. low is not used.
    - "clip": w, but at least low and at most high.
    - "mask": w inside [low, high], else 0: on tokens IcePop, https://ringtech.notion.site/icepop; on sequences masked
      importance sampling, https://richardli.xyz/rl-collapse.
    """
    weight = log_weight.exp()
    match mode:
        case "truncate":
            return weight.clamp(max=high)
        case "clip":
            return weight.clamp(min=low, max=high)
        case "mask":
            # Outside, not inside: what is nan stays nan and is found, instead of being masked like an outlier.
            return torch.where(outside(log_weight, low=low, high=high), 0.0, weight)
    raise ValueError(f'unknown correction mode "{mode}"')


def vetoed(mismatch: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, below: float) -> Tensor:
    """[T] bool, True on all tokens of a sequence in which the trainer gives some loss token less than `below` times the
    probability that the engine gave it: s < ln(below)."""
    catastrophic = loss_mask & (mismatch.detach() < math.log(below))
    return on_tokens(sequence_sums(catastrophic.double(), cu_seqlens) > 0, cu_seqlens, len(mismatch))


def off_policy_sequences(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    delta_nats: float,
) -> Tensor:
    """[T] bool, True on sequences of negative advantage that the policy has moved away from: OPSM, arXiv:2512.02556.

    Moved away: the mean of rollout_logprobs - logprobs over the loss tokens, an estimate of KL(engine || policy), is
    above delta_nats. It counts both what engine and trainer disagree about and the policy's own updates. Where
    advantages differ within a sequence, the sign is that of their sum over its loss tokens.
    """
    moved = torch.where(loss_mask, (rollout_logprobs - logprobs.detach()).double(), 0.0)
    distance = sequence_sums(moved, cu_seqlens) / sequence_sums(loss_mask.double(), cu_seqlens).clamp(min=1)
    bad = sequence_sums(torch.where(loss_mask, advantages, 0.0).double(), cu_seqlens) < 0
    return on_tokens(bad & (distance > delta_nats), cu_seqlens, len(logprobs))


def weight_sums(weights: Tensor, accepted: Tensor, cu_seqlens: Tensor, *, level: str) -> tuple[Tensor, Tensor]:
    """(sum, number) of the weights, [] float64 each, from which a batch's mean weight is taken.

    At "token" level a weight counts once for each token that is `accepted`, [T] bool; at the others once for each
    sequence that has one, whatever its length.
    """
    of_accepted = torch.where(accepted, weights, 0.0)
    if level == "token":
        return of_accepted.double().sum(), accepted.sum().double()
    counts = sequence_sums(accepted.double(), cu_seqlens)
    return (sequence_sums(of_accepted, cu_seqlens) / counts.clamp(min=1)).sum(), (counts > 0).sum().double()
