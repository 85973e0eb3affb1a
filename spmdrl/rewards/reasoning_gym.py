"""Verifier for reasoning-gym: each task of that package checks answers to its own items."""

from __future__ import annotations

from spmdrl.rewards.item import RewardItem
from spmdrl.workers.reasoning_gym import rate


def reward(item: RewardItem) -> float:
    """Return the task's own rating, 0 to 1, of the text in the last <answer> tags, or of the whole response."""
    return rate(item.response, question=item.prompt, answer=item.answer, task=item.task, metadata=item.metadata)
