"""The response's final answer is mathematically the reference answer: the math-verify package decides."""

from __future__ import annotations

import logging

from math_verify import parse, verify

from spmdrl.rewards.item import RewardItem

# Its own time limits are alarm signals; they are switched off below because the scorer's limit covers them, and
# it would warn about that in every process.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MATH_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def score(item: RewardItem) -> float:
    """1 when the last answer that the response gives equals the reference answer."""
    answer = item.reference_answer()
    # Bare LaTeX such as \frac{1}{2} is only recognised inside a mathematical environment.
    delimited = answer if any(mark in answer for mark in _MATH_DELIMITERS) else f"\\boxed{{{answer}}}"
    expected = parse(delimited, parsing_timeout=None)
    if not expected:
        raise ValueError(f"math-verify finds no mathematics in the reference answer {answer!r}")
    given = parse(item.response, parsing_timeout=None)
    return float(verify(expected, given, timeout_seconds=None))
