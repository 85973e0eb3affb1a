"""Classes with gymnasium's `reset` and `step`, whose actions are text, and observations text or parts with images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spmdrl import user_code
from spmdrl.conversation import Action, EpisodeStart, Message, Observation
from spmdrl.envs.protocol import run


def load(name: str, params: dict[str, Any]) -> GymnasiumMaker:
    """Make environments of a class by its name, or of an id that gymnasium knows where the name has no colon.

    Raises ValueError when there is none.
    """
    return GymnasiumMaker(partial(user_code.load(name) if ":" in name else _registered(name), **params))


def _registered(name: str) -> Callable[..., Any]:
    """Makes the environments that gymnasium has under a name."""
    try:
        import gymnasium
    except ImportError as error:
        raise ValueError(
            f'name = "{name}" has no colon, so that it is an id of gymnasium\'s, which cannot be imported: {error}; '
            "install gymnasium, or give package.module:Class or path/to/file.py:Class"
        ) from error
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise ValueError(f'name = "{name}" is no id that gymnasium knows: {error}') from error
    return partial(gymnasium.make, name)


class GymnasiumMaker:
    """The environments of one process."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.tools: list[dict[str, Any]] = []
        self._make = make

    def __call__(self) -> GymnasiumEnvironment:
        """Make the environment of one episode."""
        return GymnasiumEnvironment(self._make)

    async def close(self) -> None:
        """Hold nothing: each episode has an environment of its own."""


class GymnasiumEnvironment:
    """An episode of such an environment."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._inner: Any = None

    async def reset(self, start: EpisodeStart) -> Observation:
        """Begin the episode with its seed; `options` has the prompt, its answer, task and metadata."""
        self._inner = await run(self._make)
        data = {"prompt": start.prompt, "answer": start.answer, "task": start.task}
        arguments = {"seed": start.seed, "options": {**start.metadata, **data}}
        result = await run(user_code.call, function=self._inner.reset, columns=arguments, settings={})
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"reset must return (observation, info), and returned {type(result).__name__}")
        return Observation(messages=_messages(result[0]))

    async def step(self, action: Action) -> Observation:
        """Hand over the response's text."""
        result = await run(partial(self._inner.step, action.text))
        if not isinstance(result, tuple) or len(result) != 5:
            raise TypeError(
                "step must return (observation, reward, terminated, truncated, info), and returned "
                f"{type(result).__name__}"
            )
        observation, reward, terminated, truncated, _ = result
        return Observation(
            messages=_messages(observation), reward=float(reward), done=bool(terminated) or bool(truncated)
        )

    async def close(self) -> None:
        """Close the environment, where it can be."""
        if hasattr(self._inner, "close"):
            await run(self._inner.close)


def _messages(observation: Any) -> tuple[Message, ...]:
    if observation is None:
        return ()
    if not isinstance(observation, str | list):
        raise TypeError(
            f"the observation is {type(observation).__name__} and neither text nor a list of parts; wrap the "
            'environment in one that writes it, or that shows it: [{"type": "image", "image": array}]'
        )
    return ({"role": "user", "content": observation},) if observation else ()
