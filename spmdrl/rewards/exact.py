"""The response is the reference answer, or it is not."""

from __future__ import annotations

from spmdrl.rewards.item import RewardItem


def score(item: RewardItem) -> float:
    """1 when response and reference answer are the same text between their outer white space."""
    return float(item.response.strip() == item.reference_answer().strip())
