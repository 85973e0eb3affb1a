"""OpenEnv servers, spoken to over their WebSocket by the package's own client."""

from __future__ import annotations

import json
import math
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from spmdrl.conversation import Action, EpisodeStart, Message, Observation


def load(url: str, action: str) -> OpenEnvMaker:
    """Make environments on the server at this address; the action's field `action` gets the response's text."""
    return OpenEnvMaker(url, action)


class OpenEnvMaker:
    """The environments of one process."""

    def __init__(self, url: str, field: str) -> None:
        self.tools: list[dict[str, Any]] = []
        self._url, self._field = url, field

    def __call__(self) -> OpenEnvEnvironment:
        """Make the environment of one episode."""
        return OpenEnvEnvironment(self._url, self._field)

    async def close(self) -> None:
        """Hold nothing: each episode has a connection of its own."""


class OpenEnvEnvironment:
    """An episode on the server: one connection, which is one session there."""

    def __init__(self, url: str, field: str) -> None:
        # Steps have a limit already, that of the environment's process.
        self._client = GenericEnvClient(url, message_timeout_s=math.inf, mode="simulation")
        self._field = field

    async def reset(self, start: EpisodeStart) -> Observation:
        """Begin the episode with its seed; the server also gets the prompt, its answer, task and metadata."""
        data = {"prompt": start.prompt, "answer": start.answer, "task": start.task, "seed": start.seed}
        return _observation(await self._client.reset(**{**start.metadata, **data}))

    async def step(self, action: Action) -> Observation:
        """Send the response's text."""
        return _observation(await self._client.step({self._field: action.text}))

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def _observation(result: Any) -> Observation:
    return Observation(messages=_messages(result.observation), reward=float(result.reward or 0.0), done=result.done)


def _messages(fields: dict[str, Any]) -> tuple[Message, ...]:
    """The observation as the policy reads it: its text, where it has one field and that is a text, else as JSON."""
    values = list(fields.values())
    text = values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)
    return ({"role": "user", "content": text},) if fields and text else ()
