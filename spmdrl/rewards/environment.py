"""Verifier of an environment's episodes: the rewards that the environment itself gave."""

from __future__ import annotations

from spmdrl.rewards.item import RewardItem


def reward(item: RewardItem) -> float:
    """Return the sum of what the environment gave for each turn."""
    return item.environment_reward
