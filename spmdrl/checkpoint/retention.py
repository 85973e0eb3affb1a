"""Retention: choose the checkpoints to delete."""

from __future__ import annotations

from collections.abc import Mapping


def superseded(metric: Mapping[int, float | None], *, keep_last: int, keep_every: int = 0) -> list[int]:
    """Return the steps whose checkpoints can be deleted, oldest first.

    `metric` maps the step of every checkpoint to its value of the metric `checkpoint.keep_best`, None where that was
    not measured. Kept are the last `keep_last`, every `keep_every`-th step except step 0 (0: none), and the one with
    the highest value, the first of equal ones.
    """
    steps = sorted(metric)
    kept = set(steps[-keep_last:])
    if keep_every:
        kept |= {step for step in steps if step and step % keep_every == 0}
    measured = {step: value for step in steps if (value := metric[step]) is not None}
    if measured:
        kept.add(max(measured, key=lambda step: (measured[step], -step)))
    return [step for step in steps if step not in kept]
