"""The environment of `episodes.py`: a tool that takes some time over each answer, and knows how to wait."""

from __future__ import annotations

import asyncio
import random
import string

FEWEST_TURNS, MOST_TURNS = 2, 8
LONGEST_ANSWER = 128  # characters


class SlowTool:
    """Answers with text of some length; the episode's seed decides the texts and the number of turns."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def reset(self, seed: int) -> None:
        """Begin an episode."""
        self._draw = random.Random(f"tool {seed}")
        self._turns_left = self._draw.randint(FEWEST_TURNS, MOST_TURNS)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Answer, whatever the action is, after the delay."""
        await asyncio.sleep(self._delay_s)
        self._turns_left -= 1
        text = "".join(self._draw.choices(string.ascii_lowercase, k=self._draw.randint(8, LONGEST_ANSWER)))
        return text, 0.0, self._turns_left == 0
