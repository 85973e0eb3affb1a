"""An environment for small runs: it answers three times, with random digits that follow from its seed."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from spmdrl.envs import Action, Observation

# Tables of a run of it: most tokens end a response, so that a model that knows nothing gets to its later turns.
TABLES: dict[str, Any] = {
    "rollout": {"max_response_tokens": 40, "stop_token_ids": [*range(14, 99)]},
    "environment": {"max_turns": 4},
    "reward": {"terms": [{"kind": "environment"}]},
}


class Hints:
    """The reward of a turn is the share of digits in the response; the policy reads a digit in between."""

    def __init__(self, num_turns: int = 3, marker: str = "") -> None:
        """With a file `marker`, the first episode that reaches its second turn writes it and waits for its removal."""
        self._num_turns, self._marker = num_turns, marker
        self._turn = 0

    def reset(self, prompt: str, seed: int) -> None:
        self._random = random.Random(f"{prompt} {seed}")

    def step(self, action: Action) -> Observation:
        self._turn += 1
        if self._turn == 2 and self._marker and not Path(self._marker).exists():
            Path(self._marker).write_text("in the middle of an episode")
            time.sleep(60)
        digits = sum(character.isdigit() for character in action.text)
        return Observation(
            messages=({"role": "user", "content": f" {self._random.randrange(10)};"},),
            reward=digits / (1 + len(action.text)),
            done=self._turn == self._num_turns,
            metrics={"digits": float(digits)},
        )
