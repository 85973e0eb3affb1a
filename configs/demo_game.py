"""The game of configs/demo-game.toml: guess a number, and read whether it is higher or lower."""

import random


class GuessTheNumber:
    """One game. It lasts until the number is found, or as many turns as `environment.max_turns` allows."""

    def __init__(self, highest: int) -> None:
        self.highest = highest

    def reset(self, seed: int) -> None:
        """Think of a number; the prompt does not tell it."""
        self.number = random.Random(seed).randint(1, self.highest)

    def step(self, guess: str) -> tuple[str | None, float, bool]:
        """Return what the policy reads next, the reward of its guess, and whether the game is over."""
        if not guess.isdecimal():
            return "no number", 0.0, False
        if int(guess) == self.number:
            return None, 1.0, True
        return "higher" if int(guess) < self.number else "lower", 0.0, False
