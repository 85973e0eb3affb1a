"""The input of a verifier: one rollout as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmdrl.conversation import Action, Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One rollout as text, with the prompt's data."""

    prompt: str
    response: str  # the last one of an episode
    answer: str | None  # the reference answer, when the data has one
    metadata: dict[str, Any]  # the prompt's
    task: str  # the data source it came from
    # What the policy did in each turn of an episode, and what its environment answered.
    turns: tuple[tuple[Action | None, Observation | None], ...] = ()
    environment_reward: float = 0.0  # the sum of what the environment gave for each turn

    def reference_answer(self) -> str:
        """Return the answer, for verifiers that need one. Raises ValueError if there is none."""
        if self.answer is None:
            raise ValueError("the data has no reference answer for this prompt; set answer_column")
        return self.answer
