"""Advantages: a rollout's reward relative to the other rollouts of its prompt group."""

from __future__ import annotations

from torch import Tensor

EPS = 1e-6  # added to a deviation before dividing by it; in the units of the reward


def group_advantages(rewards: Tensor, *, estimator: str, divide_by_std: bool) -> Tensor:
    """Advantages [P, G] of rewards [P, G]: P prompt groups of G >= 2 rollouts.

    With mean and std those of the group, std the unbiased one (G - 1):

    - "grpo": (R - mean) / (std + EPS), DeepSeekMath arXiv:2402.03300; without `divide_by_std` R - mean, Dr.GRPO
      arXiv:2503.20783.
    - "rloo": R minus the mean of the other G - 1, arXiv:2402.14740, which is (R - mean) G / (G - 1).
    - "reinforce_plus_plus_baseline": R - mean, to be whitened over the global batch, REINFORCE++ arXiv:2501.03262.

    Only "grpo" knows `divide_by_std`. A group of equal rewards has advantages of exactly 0.
    """
    group_size = rewards.shape[1]
    if group_size < 2:
        raise ValueError(f"a prompt group of {group_size} rollout has nothing to compare its reward with; use 2 or more")
    # Taken from the group's first reward: the mean of equal rewards may round, and the rounding error divided by
    # EPS would be an advantage.
    shifted = rewards - rewards[:, :1]
    centred = shifted - shifted.mean(dim=1, keepdim=True)
    match estimator:
        case "grpo":
            return centred / (shifted.std(dim=1, keepdim=True) + EPS) if divide_by_std else centred
        case "rloo":
            return centred * (group_size / (group_size - 1))
        case "reinforce_plus_plus_baseline":
            return centred
    raise ValueError(f'unknown advantage estimator "{estimator}"')


def moments(advantages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (sum [], sum of squares [], count []) of advantages [N], each counted weights [N] times.

    weights are the rollouts' loss tokens. Sums, so that they can be added over ranks; then mean = sum / count and
    std = sqrt(sum of squares / count - mean^2). Use float64 advantages: that difference cancels.
    """
    weights = weights.to(advantages.dtype)
    weighted = weights * advantages
    return weighted.sum(), (weighted * advantages).sum(), weights.sum()


def whiten(advantages: Tensor, *, mean: float, std: float, eps: float = EPS) -> Tensor:
    """(A - mean) / (std + eps), with the mean and std of the global batch's loss tokens. REINFORCE++ arXiv:2501.03262."""
    return (advantages - mean) / (std + eps)
