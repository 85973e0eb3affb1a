"""Reasoning-gym items, tried again until the task's own scorer gives 1."""

from __future__ import annotations

from typing import Any

from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.protocol import run
from spmdrl.workers.reasoning_gym import rate


def load(feedback: str) -> ReasoningGymMaker:
    """Make environments that answer an attempt with this text. Raises ValueError when it cannot hold a score."""
    try:
        feedback.format(score=0.5)
    except (AttributeError, LookupError, ValueError) as error:
        raise ValueError(
            f'feedback = "{feedback}" cannot be filled in: {error!r}; of braces it may have {{score}} and {{score:g}}, '
            "and others are written twice"
        ) from error
    return ReasoningGymMaker(feedback)


class ReasoningGymMaker:
    """The environments of one process."""

    def __init__(self, feedback: str) -> None:
        self.tools: list[dict[str, Any]] = []
        self._feedback = feedback

    def __call__(self) -> ReasoningGymEnvironment:
        """Make the environment of one episode."""
        return ReasoningGymEnvironment(self._feedback)

    async def close(self) -> None:
        """Hold nothing."""


class ReasoningGymEnvironment:
    """Attempts at one item.

    An attempt's reward is its improvement on the best one before it, the first on 0. So the episode's reward, their
    sum, is the best attempt's score, and trying once more after a good attempt gains nothing by itself.
    """

    def __init__(self, feedback: str) -> None:
        self._feedback = feedback
        self._best = 0.0

    async def reset(self, start: EpisodeStart) -> Observation:
        """Add nothing to the prompt, which is the item's question."""
        self._start = start
        self._best = 0.0
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Score an attempt; below 1 the policy reads the feedback and has another one."""
        start = self._start
        score = await run(
            rate,
            text=action.text,
            question=start.prompt,
            answer=start.answer,
            task=start.task,
            metadata=start.metadata,
        )
        reward, self._best = max(0.0, score - self._best), max(self._best, score)
        if score >= 1.0:
            return Observation(reward=reward, done=True)
        message = {"role": "user", "content": self._feedback.format(score=score)}
        return Observation(messages=(message,), reward=reward)

    async def close(self) -> None:
        """Hold nothing."""
