"""Numbers that change over a run: the learning rate, and coefficients that follow a target."""

from __future__ import annotations

import math

# The learning rate over a run, as a fraction of its peak.


def lr_fraction(
    step: int, *, schedule: str, num_steps: int, warmup_steps: int, decay_steps: int, min_lr_fraction: float
) -> float:
    """Learning rate of optimizer step `step`, counted from 1, over the peak.

    Warm-up is linear: 1 / warmup_steps at the first step, 1 at step warmup_steps. Then "constant" stays; "linear"
    and "cosine" (arXiv:1608.03983, without restarts) fall at once; "wsd" (arXiv:2404.06395) stays and falls linearly
    over the last decay_steps. What falls would reach min_lr_fraction one step after the last, so that the last step
    still learns when that is 0.
    """
    if step < warmup_steps:
        return step / warmup_steps
    peak_step = max(warmup_steps, 1)
    match schedule:
        case "constant":
            height = 1.0
        case "linear":
            height = 1.0 - _progress(step, peak_step, num_steps)
        case "cosine":
            height = (1.0 + math.cos(math.pi * _progress(step, peak_step, num_steps))) / 2.0
        case "wsd":
            height = 1.0 - _progress(step, max(peak_step, num_steps - decay_steps), num_steps)
        case _:
            raise ValueError(f'unknown learning-rate schedule "{schedule}"')
    return min_lr_fraction + (1.0 - min_lr_fraction) * height


def _progress(step: int, last_peak_step: int, num_steps: int) -> float:
    """How much of the way from last_peak_step to num_steps + 1 lies behind `step`, 0 to 1."""
    return min(1.0, max(0, step - last_peak_step) / max(1, num_steps + 1 - last_peak_step))


# Coefficients that follow a target: from the value of one step to that of the next.


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
