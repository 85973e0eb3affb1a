"""Environments by the `kind` of their source: classes of the user's, classes of gymnasium's, reasoning-gym, OpenEnv.

An environment process imports this file, so it imports a kind's own package only when that kind is loaded.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from spmdrl import user_code
from spmdrl.conversation import Action, EpisodeStart, Message, Observation
from spmdrl.data.image_forms import Content
from spmdrl.envs.observations import shown
from spmdrl.envs.protocol import Maker, run
from spmdrl.workers.channel import needs_package

# kind = "class": a class of the user's with `reset(prompt, seed)` and `step(action)`, sync or async.

_COLUMNS = ("prompt", "answer", "task", "metadata", "seed")  # what a reset may take, by keyword


def load_class(*, name: str, params: dict[str, Any]) -> Maker:
    """Return a maker of the environments that the class of this name makes of its parameters.

    Raises ValueError if there is no such class, or if it cannot be used so.
    """
    found = user_code.load(name)
    if inspect.isclass(found) and (problem := next(_problems(found, params), None)):
        raise ValueError(f"{found.__name__} {problem}")
    return Maker(partial(ClassEpisode, partial(found, **params)))


class ClassEpisode:
    """One instance of the user's class, made when its episode begins."""

    def __init__(self, construct: Callable[[], Any]) -> None:
        self._construct = construct
        self._instance: Any = None

    async def reset(self, start: EpisodeStart) -> Observation:
        """Make the instance, and call its `reset` with what it takes of the episode's start."""
        self._instance = await run(self._construct)
        return _class_reset(await run(partial(user_code.call, self._instance.reset, asdict(start), {})))

    async def step(self, action: Action) -> Observation:
        """Call its `step` with the action, or with the action's text where the parameter is annotated `str`."""
        step = self._instance.step
        argument = action.text if _takes_text(step) else action
        return _class_observation(await run(partial(step, argument)))

    async def close(self) -> None:
        """Call its `close`, if it has one."""
        close = getattr(self._instance, "close", None)
        if close is not None:
            await run(close)


def _class_reset(result: Any) -> Observation:
    match result:
        case Observation():
            return result
        case None:
            return Observation()
        case str() | list():
            return Observation(messages=_user_messages(result or None))
    raise ValueError(
        f"reset must return None, a text, a list of parts or an Observation, but it returned {shown(result)}"
    )


def _class_observation(result: Any) -> Observation:
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
    messages = _user_messages(None if done and not content else content)
    return Observation(messages=messages, reward=reward, done=done, metrics=metrics)


def _user_messages(content: Content | None) -> tuple[Message, ...]:
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
    for problem in user_code.argument_problems(partial(found.reset, None), _COLUMNS, {}):  # type: ignore[attr-defined]
        yield f"has a reset that cannot be called: {problem}"
    try:
        inspect.signature(partial(found.step, None)).bind(None)  # type: ignore[attr-defined]
    except TypeError as error:
        yield f"has a step that cannot be called with an action: {error}"


# kind = "gymnasium": `reset` and `step` of gymnasium, whose actions are text, and observations text or parts.


def load_gymnasium(name: str, params: dict[str, Any]) -> Maker:
    """Make environments of a class by its name, or of an id that gymnasium knows where the name has no colon.

    Raises ValueError when there is none.
    """
    make = user_code.load(name) if ":" in name else _registered(name)
    return Maker(partial(GymnasiumEpisode, partial(make, **params)))


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


class GymnasiumEpisode:
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
        return Observation(messages=_shown_messages(result[0]))

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
            messages=_shown_messages(observation), reward=float(reward), done=bool(terminated) or bool(truncated)
        )

    async def close(self) -> None:
        """Close the environment, where it can be."""
        if hasattr(self._inner, "close"):
            await run(self._inner.close)


def _shown_messages(observation: Any) -> tuple[Message, ...]:
    if observation is None:
        return ()
    if not isinstance(observation, str | list):
        raise TypeError(
            f"the observation is {type(observation).__name__} and neither text nor a list of parts; wrap the "
            'environment in one that writes it, or that shows it: [{"type": "image", "image": array}]'
        )
    return ({"role": "user", "content": observation},) if observation else ()


# kind = "reasoning_gym": items that are tried again until the task's own scorer gives 1.


def load_reasoning_gym(feedback: str) -> Maker:
    """Make environments that answer an attempt with this text. Raises ValueError when it cannot hold a score."""
    try:
        feedback.format(score=0.5)
    except (AttributeError, LookupError, ValueError) as error:
        raise ValueError(
            f'feedback = "{feedback}" cannot be filled in: {error!r}; of braces it may have {{score}} and {{score:g}}, '
            "and others are written twice"
        ) from error
    with needs_package("reasoning_gym"):
        from spmdrl.workers.reasoning_gym import rate
    return Maker(partial(ReasoningGymEpisode, rate, feedback))


class ReasoningGymEpisode:
    """Attempts at one item.

    An attempt's reward is its improvement on the best one before it, the first on 0. So the episode's reward, their
    sum, is the best attempt's score, and trying once more after a good attempt gains nothing by itself.
    """

    def __init__(self, rate: Callable[..., float], feedback: str) -> None:
        self._rate, self._feedback = rate, feedback
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
            self._rate,
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


# kind = "openenv": OpenEnv servers, spoken to over their WebSocket by the package's own client.


def load_openenv(url: str, action: str) -> Maker:
    """Make environments on the server at this address; the action's field `action` gets the response's text."""
    with needs_package("openenv"):
        from openenv.core.generic_client import GenericEnvClient
    # Steps have a limit already, that of the environment's process.
    connect = partial(GenericEnvClient, url, message_timeout_s=math.inf, mode="simulation")
    return Maker(lambda: OpenEnvEpisode(connect(), action))


class OpenEnvEpisode:
    """An episode on the server: one connection, which is one session there."""

    def __init__(self, client: Any, field: str) -> None:
        self._client, self._field = client, field

    async def reset(self, start: EpisodeStart) -> Observation:
        """Begin the episode with its seed; the server also gets the prompt, its answer, task and metadata."""
        data = {"prompt": start.prompt, "answer": start.answer, "task": start.task, "seed": start.seed}
        return _server_observation(await self._client.reset(**{**start.metadata, **data}))

    async def step(self, action: Action) -> Observation:
        """Send the response's text."""
        return _server_observation(await self._client.step({self._field: action.text}))

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


def _server_observation(result: Any) -> Observation:
    """Show the policy the observation's text, where it has one field and that is a text, else JSON."""
    fields: dict[str, Any] = result.observation
    values = list(fields.values())
    text = values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)
    messages = ({"role": "user", "content": text},) if fields and text else ()
    return Observation(messages=messages, reward=float(result.reward or 0.0), done=result.done)
