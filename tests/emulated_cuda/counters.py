"""Counters of a phase: kernel launches, waits of the host, bytes that kernels read and write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from .bindings import core


@dataclass
class Phase:
    """Counts between two moments. An in-place operand counts as written; views are as large as they look."""

    launches: int = 0
    synchronizations: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    launches_of: Counter[str] = field(default_factory=Counter)


def total() -> Phase:
    """Return what this process has counted so far."""
    *numbers, launches_of = core().counters()
    return Phase(*numbers, Counter(launches_of))


@contextmanager
def counted() -> Iterator[Phase]:
    """Fill in a phase when the block ends."""
    before, phase = total(), Phase()
    try:
        yield phase
    finally:
        after = total()
        for name in ("launches", "synchronizations", "read_bytes", "written_bytes"):
            setattr(phase, name, getattr(after, name) - getattr(before, name))
        phase.launches_of = after.launches_of - before.launches_of
