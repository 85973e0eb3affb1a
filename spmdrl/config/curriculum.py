"""The table of a curriculum, and the rules that give it a signal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from spmdrl.config.base import Count, Fraction, Section, rule, unused_settings


class GateConfig(Section):
    opens: str
    """Source of `[[data.sources]]`, by its `task`, whose prompts are left out until the gate opens."""
    after: str
    """Source whose success opens it."""
    success: Fraction
    """Mean success rate of the latest groups of `after` from which the gate is open; then it stays open."""
    groups: Count = 32
    """How many groups of `after` the mean is taken over; with fewer the gate is shut."""


class CurriculumConfig(Section):
    kind: Literal["all", "band", "learnability", "function"] = "all"
    """The chance that a prompt is taken when its turn comes, from the fraction p of right responses when it was last
    sampled; prompts that never were are taken. `all`: 1. `band`: 1 where `low` <= p <= `high`, and `explore` elsewhere.
    `learnability`: 4p(1 - p), at least `explore` (arXiv 2502.12272). `function`: what a function of yours returns."""
    low: Fraction = 0.1
    """Smallest p of a band."""
    high: Fraction = 0.9
    """Largest p of a band."""
    explore: Annotated[float, Field(ge=1e-3, le=1.0)] = 0.1
    """Smallest chance of a prompt, so that those that were too easy or too hard are sampled again."""
    function: Annotated[str, Field(pattern=":")] | None = None
    """`package.module:function` or `path/file.py:function`. It returns a chance from 0 to 1, and is called with those
    of `task`, `success` (p, or None), `visits` (times sampled), `epoch` and `metadata` that it has a parameter for."""
    gates: Annotated[tuple[GateConfig, ...], Field(strict=False)] = ()
    """Sources that come later, each as a table `[[data.curriculum.gates]]`."""

    @property
    def needs_repeats(self) -> bool:
        """True when it only knows prompts that come again."""
        return self.kind in ("band", "learnability")


@rule(CurriculumConfig)
def curricula_say_something(curriculum: CurriculumConfig) -> Iterator[str]:
    kind = f'kind = "{curriculum.kind}"'
    if curriculum.kind != "band":
        yield from unused_settings(curriculum, ("low", "high"), kind)
    if not curriculum.needs_repeats:
        yield from unused_settings(curriculum, ("explore",), kind)
    if curriculum.kind != "function":
        yield from unused_settings(curriculum, ("function",), kind)
    elif curriculum.function is None:
        yield 'function is not set, which kind = "function" calls; set it to "path/file.py:function"'
    if curriculum.low > curriculum.high:
        yield f"low = {curriculum.low:g} is above high = {curriculum.high:g}, so that no rate lies between; swap them"
    if curriculum.kind == "all" and not curriculum.gates:
        yield 'kind = "all" without gates takes every prompt, as a run without a curriculum does; remove the table'


@rule(CurriculumConfig)
def gates_lead_somewhere(curriculum: CurriculumConfig) -> Iterator[str]:
    before = {gate.opens: gate.after for gate in curriculum.gates}
    for place, gate in enumerate(curriculum.gates):
        if gate.opens in [other.opens for other in curriculum.gates[:place]]:
            yield f'gates.{place}.opens = "{gate.opens}" is opened by another gate already; remove one of them'
        behind, steps = gate.after, 0
        while behind in before and behind != gate.opens and steps < len(before):
            behind, steps = before[behind], steps + 1
        if behind == gate.opens:
            yield f'gates.{place}: "{gate.opens}" waits for itself, so that it never opens; name another source'
