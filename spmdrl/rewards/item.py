"""What a verifier sees of one rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardItem:
    """One rollout as text, with what its reward needs to know."""

    prompt: str
    response: str
    answer: str | None  # the reference answer, when the data has one
    metadata: dict[str, Any]  # the prompt's
    task: str  # the data source it came from

    def reference_answer(self) -> str:
        """The answer, for verifiers that cannot do without."""
        if self.answer is None:
            raise ValueError("the data has no reference answer for this prompt; set answer_column")
        return self.answer
