"""Classes as TRL's `environment_factory` takes them: `reset` begins an episode, the other public methods are tools.

Two things differ from TRL. The text of `reset` is a message of its own, after the prompt's, and not the end of the
prompt's last message. And rewards are read after each response, not once: see TrlEnvironment.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable
from typing import Any

from spmdrl import user_code
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.protocol import run
from spmdrl.envs.toolbox import Toolbox, tool_of

_NO_TOOLS = ("reset", "get_reward")


def load(name: str) -> TrlMaker:
    """Make environments of a class, or of what a function makes, by its name.

    Raises ValueError when it cannot be made without arguments, has no `reset`, or a method that has no schema.
    """
    factory = user_code.load(name)
    try:
        probe = factory()
    except Exception as error:
        raise ValueError(f"{name} cannot be made without arguments: {type(error).__name__}: {error}") from error
    if not inspect.ismethod(getattr(probe, "reset", None)):
        raise ValueError(f"{name} has no method reset, which begins an episode")
    return TrlMaker(factory, _toolbox(probe))


def _toolbox(environment: Any) -> Toolbox:
    # Of the class: looking at an instance's attributes would run its properties.
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    tools = (name for name in names if not name.startswith("_") and name not in _NO_TOOLS)
    return Toolbox((tool_of(getattr(environment, name)) for name in tools), in_order=True)


class TrlMaker:
    """The environments of one process."""

    def __init__(self, factory: Callable[[], Any], toolbox: Toolbox) -> None:
        self.tools = toolbox.schemas
        self._factory = factory

    def __call__(self) -> TrlEnvironment:
        """Make the environment of one episode."""
        return TrlEnvironment(self._factory)

    async def close(self) -> None:
        """Hold nothing: each episode has an instance of its own."""


class TrlEnvironment:
    """An episode of such a class.

    The class's reward is what its `get_reward()` returns, or else its attribute `reward`, which TRL's reward functions
    read; without either, rewards come from the terms of [reward] alone. A step's reward is the change since the step
    before, so that their sum is the last value also where a limit ends the episode.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._reward = 0.0

    async def reset(self, start: EpisodeStart) -> Observation:
        """Hand the prompt's columns to the class's `reset`: prompt, answer, task, seed, and those of the metadata."""
        self._inner = await run(self._factory)
        self._toolbox = _toolbox(self._inner)
        self._reward = 0.0
        columns: dict[str, Any] = {
            "prompt": start.prompt,
            "answer": start.answer,
            "task": start.task,
            "seed": start.seed,
        }
        columns |= start.metadata
        content = await run(user_code.call, function=self._inner.reset, columns=columns, settings={})
        if content is None:
            return Observation()
        if not isinstance(content, str | list):
            raise TypeError(f"reset returned {type(content).__name__}, and not text, a list of parts or None")
        return Observation(messages=({"role": "user", "content": content},))

    async def step(self, action: Action) -> Observation:
        """Run the calls; an action without one is the end."""
        answer = await self._toolbox.answer(action)
        before, self._reward = self._reward, await self._current_reward()
        return Observation(
            messages=answer.messages,
            reward=self._reward - before,
            done=answer.done,
            tool_errors=answer.tool_errors,
        )

    async def close(self) -> None:
        """Drop the instance; TRL's contract has no method for it."""
        del self._inner

    async def _current_reward(self) -> float:
        if hasattr(self._inner, "get_reward"):
            value = await run(self._inner.get_reward)
        else:
            value = getattr(self._inner, "reward", 0.0)
        if not isinstance(value, numbers.Real):
            raise TypeError(f"the reward is {type(value).__name__} and not a number")
        return float(value)
