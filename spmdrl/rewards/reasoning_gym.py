"""Verifier for reasoning-gym: each task of that package checks answers to its own items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import extract_answer

from spmdrl.rewards.item import RewardItem

_scorers: dict[tuple[str, str], Callable[..., float]] = {}


def reward(item: RewardItem) -> float:
    """Return the task's own rating, 0 to 1, of the text in the last <answer> tags, or of the whole response."""
    tagged = extract_answer(item.response)
    answer = item.response.strip() if tagged is None else tagged
    # An item from a file may have columns `question` and `metadata`, which replace these defaults.
    entry = {"question": item.prompt, "answer": item.answer, "metadata": {}, **item.metadata}
    return _scorer(item.task, item.metadata.get("params", {}))(answer=answer, entry=entry)


def _scorer(task: str, params: dict[str, Any]) -> Callable[..., float]:
    # Some tasks need the data set's parameters to check an answer, but the package's get_score_answer_fn uses the
    # defaults. Creating a data set can take long, so each is created once.
    key = (task, repr(sorted(params.items())))
    if key not in _scorers:
        _scorers[key] = create_dataset(task, **params).score_answer
    return _scorers[key]
