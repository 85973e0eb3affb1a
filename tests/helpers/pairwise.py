"""Few combinations of settings that together have every pair of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]  # a value of each factor
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def all_rows(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """The full product, without what is not allowed."""
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if allowed(row)]


def pairs_of(rows: Iterable[Row]) -> set[Pair]:
    """Every two values that some row has together."""
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def covering(rows: Sequence[Row], cost: Callable[[Row], float] = lambda row: 1.0) -> list[Row]:
    """Choose rows with all the pairs that the given ones have: always the one with most new pairs for its cost."""
    pairs = [pairs_of([row]) for row in rows]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & missing) / cost(rows[number]))
        chosen.append(rows[best])
        missing -= pairs[best]
    return chosen
