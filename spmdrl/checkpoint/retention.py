"""Which checkpoints are kept."""

from __future__ import annotations

from collections.abc import Mapping


def superseded(scores: Mapping[int, float | None], *, keep_last: int, keep_every: int = 0) -> list[int]:
    """The steps whose checkpoints may go, oldest first.

    `scores` has every checkpoint by its step, with the value of the metric that `checkpoint.keep_best` names, or None
    where it was not measured. Kept are the last `keep_last`, those of every `keep_every`-th step but step 0 (0: none),
    and the one with the highest score, of equal ones the first.
    """
    steps = sorted(scores)
    kept = set(steps[-keep_last:])
    if keep_every:
        kept |= {step for step in steps if step and step % keep_every == 0}
    measured = {step: score for step in steps if (score := scores[step]) is not None}
    if measured:
        kept.add(max(measured, key=lambda step: (measured[step], -step)))
    return [step for step in steps if step not in kept]
