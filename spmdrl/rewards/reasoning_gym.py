"""The scorers of the reasoning-gym package: each task knows what a right answer to its items is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import extract_answer

from spmdrl.rewards.item import RewardItem

_scorers: dict[tuple[str, str], Callable[..., float]] = {}


def score(item: RewardItem) -> float:
    """The task's own score, 0 to 1, of what stands in the last <answer> tags, or of the whole response without them."""
    tagged = extract_answer(item.response)
    answer = item.response.strip() if tagged is None else tagged
    # For items of a file: the columns `question` and `metadata`, where it has them, complete the entry.
    entry = {"question": item.prompt, "answer": item.answer, "metadata": {}, **item.metadata}
    return _scorer(item.task, item.metadata.get("params", {}))(answer=answer, entry=entry)


def _scorer(task: str, params: dict[str, Any]) -> Callable[..., float]:
    # Some scorers read the data set's parameters, so the package's get_score_answer_fn, which takes the defaults, would
    # be wrong; making a data set can take long, so it is done once.
    key = (task, repr(sorted(params.items())))
    if key not in _scorers:
        _scorers[key] = create_dataset(task, **params).score_answer
    return _scorers[key]
