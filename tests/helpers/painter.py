"""An environment for small runs that shows pictures: none, one or two in each turn, which follow from its seed."""

from __future__ import annotations

import random
from typing import Any

import PIL.Image

from spmdrl.envs import Action, Observation


class Painter:
    """The reward of a turn is the share of digits in the response; a question with an 8 gets a file that is no
    picture."""

    def __init__(self, num_turns: int = 3) -> None:
        self._num_turns = num_turns
        self._turn = 0

    def reset(self, prompt: str, seed: int) -> list[dict[str, Any]] | None:
        self._random = random.Random(f"{prompt} {seed}")
        self._is_broken = "8" in prompt
        return self._shown(1, " look") if self._random.random() < 0.5 else None

    def step(self, action: Action) -> Observation:
        self._turn += 1
        content = self._shown((self._turn + self._random.randrange(2)) % 3, f" {self._random.randrange(10)};")
        if self._is_broken and self._turn == 2:
            content = [{"type": "image", "image": b"no picture"}]
        return Observation(
            messages=({"role": "user", "content": content},),
            reward=sum(character.isdigit() for character in action.text) / (1 + len(action.text)),
            done=self._turn == self._num_turns,
        )

    def _shown(self, number: int, text: str) -> list[dict[str, Any]]:
        images = [{"type": "image", "image": self._picture()} for _ in range(number)]
        return [{"type": "text", "text": text}, *images]

    def _picture(self) -> PIL.Image.Image:
        width, height = self._random.randint(8, 24), self._random.randint(8, 24)
        return PIL.Image.frombytes("RGB", (width, height), self._random.randbytes(3 * width * height))
