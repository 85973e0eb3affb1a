"""The input of a verifier: one rollout as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One rollout as text, with the prompt's data."""

    prompt: str
    response: str
    answer: str | None  # the reference answer, when the data has one
    metadata: dict[str, Any]  # the prompt's
    task: str  # the data source it came from

    def reference_answer(self) -> str:
        """Return the answer, for verifiers that need one. Raises ValueError if there is none."""
        if self.answer is None:
            raise ValueError("the data has no reference answer for this prompt; set answer_column")
        return self.answer
