"""Coefficients that follow a target: from the value of one step to that of the next."""

from __future__ import annotations


def next_kl_coef(coef: float, kl_nats: float, *, target_nats: float, rollouts: int, horizon: int) -> float:
    """coef (1 + clip(kl / target - 1, -0.2, 0.2) rollouts / horizon), arXiv:1909.08593.

    kl_nats is the mean over the loss tokens of the step's `rollouts`; `horizon` is in rollouts too.
    """
    error = min(0.2, max(-0.2, kl_nats / target_nats - 1.0))
    return coef * (1.0 + error * rollouts / horizon)


def next_entropy_coef(coef: float, entropy_nats: float, *, target_nats: float, change: float) -> float:
    """coef + change where the entropy is below its target, else coef - change, but not below 0.

    After the adaptive entropy control of Skywork-OR1, arXiv:2505.22312, with one difference: there the coefficient
    counts as 0 in every step whose entropy is above the target; here it stays in the loss until it has come down to 0.
    """
    return max(0.0, coef + change if entropy_nats < target_nats else coef - change)
