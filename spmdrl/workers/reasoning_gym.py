"""Ratings of reasoning-gym: each task of that package checks answers to its own items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import extract_answer

_scorers: dict[tuple[str, str], Callable[..., float]] = {}


def rate(text: str, *, question: str, answer: str | None, task: str, metadata: dict[str, Any]) -> float:
    """Return the task's own rating, 0 to 1, of what is in the last <answer> tags, or of the whole text."""
    tagged = extract_answer(text)
    # An item from a file may have columns `question` and `metadata`, which replace these defaults.
    entry = {"question": question, "answer": answer, "metadata": {}, **metadata}
    scorer = _scorer(task, metadata.get("params", {}))
    return scorer(answer=text.strip() if tagged is None else tagged, entry=entry)


def _scorer(task: str, params: dict[str, Any]) -> Callable[..., float]:
    # Some tasks need the data set's parameters to check an answer, but the package's get_score_answer_fn uses the
    # defaults. Creating a data set can take long, so each is created once.
    key = (task, repr(sorted(params.items())))
    if key not in _scorers:
        _scorers[key] = create_dataset(task, **params).score_answer
    return _scorers[key]
