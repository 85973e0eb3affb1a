"""The learning rate over a run, as a fraction of its peak."""

from __future__ import annotations

import math


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
