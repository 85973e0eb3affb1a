"""A class of the user's with `reset(prompt, seed)` and `step(action)`, sync or async."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from spmdrl import user_code
from spmdrl.conversation import Action, EpisodeStart, Message, Observation
from spmdrl.data.image_forms import Content
from spmdrl.envs.observations import shown
from spmdrl.envs.protocol import run

_COLUMNS = ("prompt", "answer", "task", "metadata", "seed")  # what a reset may take, by keyword


def load(*, name: str, params: dict[str, Any]) -> ClassMaker:
    """Return a maker of the environments that the class of this name makes of its parameters.

    Raises ValueError if there is no such class, or if it cannot be used so.
    """
    found = user_code.load(name)
    if inspect.isclass(found) and (problem := next(_problems(found, params), None)):
        raise ValueError(f"{found.__name__} {problem}")
    return ClassMaker(functools.partial(found, **params))


class ClassMaker:
    """Makes environments of one class of the user's."""

    def __init__(self, construct: Callable[[], Any]) -> None:
        self.tools: list[dict[str, Any]] = []
        self._construct = construct

    def __call__(self) -> ClassEnvironment:
        """Make the environment of one episode."""
        return ClassEnvironment(self._construct)

    async def close(self) -> None:
        """Free nothing: the environments share nothing."""


class ClassEnvironment:
    """One instance of the user's class, made when its episode begins."""

    def __init__(self, construct: Callable[[], Any]) -> None:
        self._construct = construct
        self._instance: Any = None

    async def reset(self, start: EpisodeStart) -> Observation:
        """Make the instance, and call its `reset` with what it takes of the episode's start."""
        self._instance = await run(self._construct)
        return _greeting(await run(functools.partial(user_code.call, self._instance.reset, asdict(start), {})))

    async def step(self, action: Action) -> Observation:
        """Call its `step` with the action, or with the action's text where the parameter is annotated `str`."""
        step = self._instance.step
        argument = action.text if _takes_text(step) else action
        return _observation(await run(functools.partial(step, argument)))

    async def close(self) -> None:
        """Call its `close`, if it has one."""
        close = getattr(self._instance, "close", None)
        if close is not None:
            await run(close)


def _greeting(result: Any) -> Observation:
    match result:
        case Observation():
            return result
        case None:
            return Observation()
        case str() | list():
            return Observation(messages=_messages(result or None))
    raise ValueError(
        f"reset must return None, a text, a list of parts or an Observation, but it returned {shown(result)}"
    )


def _observation(result: Any) -> Observation:
    metrics: dict[str, Any]
    match result:
        case Observation():
            return result
        case (str() | list() | None as content, reward, done):
            metrics = {}
        case (str() | list() | None as content, reward, done, dict() as metrics):
            pass
        case _:
            raise ValueError(
                "step must return an Observation, (text, reward, done) or (text, reward, done, metrics), where instead "
                f"of the text may be a list of parts, but it returned {shown(result)}"
            )
    messages = _messages(None if done and not content else content)
    return Observation(messages=messages, reward=reward, done=done, metrics=metrics)


def _messages(content: Content | None) -> tuple[Message, ...]:
    return () if content is None else ({"role": "user", "content": content},)


def _takes_text(step: Callable[..., Any]) -> bool:
    parameter = next(iter(inspect.signature(step).parameters.values()), None)
    return parameter is not None and parameter.annotation in (str, "str")


def _problems(found: type, params: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each reason why a class cannot be used, to follow its name."""
    for method in ("reset", "step"):
        if not callable(getattr(found, method, None)):
            yield f"has no method {method}; an environment has reset(prompt, seed) and step(action)"
            return
    try:
        inspect.signature(found).bind(**params)
    except TypeError as error:
        yield f"cannot be made of params = {params}: {error}"
    for problem in user_code.argument_problems(functools.partial(found.reset, None), _COLUMNS, {}):  # type: ignore[attr-defined]
        yield f"has a reset that cannot be called: {problem}"
    try:
        inspect.signature(functools.partial(found.step, None)).bind(None)  # type: ignore[attr-defined]
    except TypeError as error:
        yield f"has a step that cannot be called with an action: {error}"
