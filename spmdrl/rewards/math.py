"""Verifier for mathematics: the math-verify package compares the response's final answer with the reference answer."""

from __future__ import annotations

import logging

from math_verify import parse, verify

from spmdrl.rewards.item import RewardItem

# math-verify's time limits use alarm signals. They are disabled below, because the pool has its own limit, and
# math-verify would warn about that in every process.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MATH_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def reward(item: RewardItem) -> float:
    """Return 1 if the last answer in the response equals the reference answer, else 0."""
    answer = item.reference_answer()
    # math-verify recognizes bare LaTeX such as \frac{1}{2} only inside a mathematical environment.
    delimited = answer if any(mark in answer for mark in _MATH_DELIMITERS) else f"\\boxed{{{answer}}}"
    expected = parse(delimited, parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify finds no mathematics in the reference answer {answer!r}")
    given = parse(item.response, parsing_timeout=None)
    return float(verify(expected, given, timeout_seconds=None))
