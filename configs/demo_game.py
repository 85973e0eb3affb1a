"""The game of configs/demo-game.toml: guess a letter, and read whether it comes earlier or later in the alphabet."""

import random
import string


class GuessTheLetter:
    """One game. It lasts until the letter is found, or as many turns as `environment.max_turns` allows."""

    def reset(self, seed: int) -> None:
        """Think of a letter; the prompt says nothing about it."""
        self.letter = random.Random(seed).choice(string.ascii_lowercase)

    def step(self, guess: str) -> tuple[str | None, float, bool]:
        """Return what the policy reads next, its reward, and whether the game is over."""
        if guess == self.letter:
            return None, 1.0, True
        return "later" if guess < self.letter else "earlier", 0.0, False
