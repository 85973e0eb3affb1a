"""Verifier for exact answers: compares the response with the reference answer as text."""

from __future__ import annotations

from spmdrl.rewards.item import RewardItem


def reward(item: RewardItem) -> float:
    """Return 1 if response and reference answer are equal up to surrounding white space, else 0."""
    return float(item.response.strip() == item.reference_answer().strip())
