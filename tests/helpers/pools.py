"""Rewards for tests: wait for the outcomes of several items."""

from __future__ import annotations

from spmdrl.rewards.client import RewardPool
from spmdrl.rewards.worker import RewardItem
from spmdrl.types import RewardOutcome


def outcomes_of(pool: RewardPool, *items: RewardItem) -> list[RewardOutcome]:
    """Compute the rewards of items, all submitted at once; in their order."""
    return [future.result() for future in [pool.submit(item) for item in items]]
