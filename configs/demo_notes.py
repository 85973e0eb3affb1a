"""The task of configs/demo-notes.toml: say at the end which number was in a box, when only a note of it is left."""

import random


class Box:
    """One box. Its number is shown after the first response, and asked for after the second."""

    def reset(self, seed: int) -> None:
        """Put a number into the box; the prompt does not tell it."""
        self.number = str(random.Random(seed).randrange(10))
        self.num_steps = 0

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """Return what the policy reads next, the reward of what it says, and whether the episode is over."""
        self.num_steps += 1
        if self.num_steps == 1:
            return self.number, 0.0, False
        if self.num_steps == 2:
            return "inside?", 0.0, False
        return None, float(text == self.number), True
