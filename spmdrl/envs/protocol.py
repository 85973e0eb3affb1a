"""An environment, as its process holds it."""

from __future__ import annotations

from typing import Any, Protocol

from spmdrl.conversation import Action, EpisodeStart, Observation


class Environment(Protocol):
    """The environment of one episode. Its methods are called one after the other, as the episode goes."""

    async def reset(self, start: EpisodeStart) -> Observation:
        """Begin the episode; returns messages to add to the prompt's, maybe none."""

    async def step(self, action: Action) -> Observation:
        """Answer an action of the policy's."""

    async def close(self) -> None:
        """Free what the episode held."""


class Maker(Protocol):
    """A source of environments: the `load(**settings)` of a kind returns it, or a coroutine that does."""

    tools: list[dict[str, Any]]  # JSON schemas, as chat templates take them; none without tools

    def __call__(self) -> Environment:
        """Make the environment of one episode."""

    async def close(self) -> None:
        """Free what the environments share."""
