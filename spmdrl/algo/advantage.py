"""Advantages: a rollout's reward relative to the other rollouts of its prompt group."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

EPS = 1e-6  # added to a deviation before dividing by it; in the units of the reward


def group_advantages(rewards: Tensor, *, estimator: str, divide_by_std: bool) -> Tensor:
    """Advantages [P, G] of rewards [P, G]: P prompt groups of G >= 2 rollouts.

    With mean and std those of the group, std the unbiased one (G - 1):

    - "grpo": (R - mean) / (std + EPS), DeepSeekMath arXiv:2402.03300; without `divide_by_std` R - mean, Dr.GRPO
      arXiv:2503.20783.
    - "rloo": R minus the mean of the other G - 1, arXiv:2402.14740, which is (R - mean) G / (G - 1).
    - "reinforce_plus_plus_baseline": R - mean, to be whitened over the global batch, REINFORCE++ arXiv:2501.03262.

    Only "grpo" knows `divide_by_std`. A group of equal rewards has advantages of exactly 0. A group's advantages are
    bitwise the same whatever other groups are in the tensor.
    """
    group_size = rewards.shape[1]
    if group_size < 2:
        raise ValueError(
            f"a prompt group of {group_size} has nothing to compare its reward with; use 2 rollouts or more"
        )
    # Taken from the group's first reward: the mean of equal rewards may round, and the rounding error divided by
    # EPS would be an advantage.
    shifted = rewards - rewards[:, :1]
    centred = shifted - _row_sums(shifted) / group_size
    match estimator:
        case "grpo" if divide_by_std:
            std = (_row_sums(centred.square()) / (group_size - 1)).sqrt()
            return centred / (std + EPS)
        case "grpo":
            return centred
        case "rloo":
            return centred * (group_size / (group_size - 1))
        case "reinforce_plus_plus_baseline":
            return centred
    raise ValueError(f'unknown advantage estimator "{estimator}"')


def _row_sums(values: Tensor) -> Tensor:
    """[P, G] to [P, 1], left to right: `Tensor.sum` rounds differently when a rank holds another number of groups."""
    return functools.reduce(torch.add, values.unbind(1))[:, None]


def moments(advantages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum [], sum of squares [], count []) of advantages [N], each counted weights [N] times.

    weights are the rollouts' loss tokens. Sums, so that they can be added over ranks; then mean = sum / count and
    std = sqrt(sum of squares / count - mean^2). Use float64 advantages: that difference cancels.
    """
    weights = weights.to(advantages.dtype)
    weighted = weights * advantages
    return weighted.sum(), (weighted * advantages).sum(), weights.sum()


def whiten(advantages: Tensor, *, mean: float, std: float, eps: float = EPS) -> Tensor:
    """(A - mean) / (std + eps), mean and std being those of the global batch's loss tokens. arXiv:2501.03262."""
    return (advantages - mean) / (std + eps)
