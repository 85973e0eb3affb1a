"""An environment, as its process holds it; and what travels between that process and its rank."""

from __future__ import annotations

import json
import math
import numbers
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.workers.sandbox import Sandbox

_OBSERVATION_KEYS = {"messages", "reward", "done", "metrics", "tool_errors", "state"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFailure:
    """The reason why there is no observation."""

    kind: Literal["timeout", "error"]
    reason: str
    traceback: str = field(default="", compare=False)


Answer = Observation | EnvironmentFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process's task: the first message it receives."""

    kind: str
    settings: dict[str, Any]  # arguments of the kind's `load`
    sandbox: Sandbox | None
    max_threads: int  # for code that is not async
    max_characters: int  # of an observation's texts together


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """A request to make an environment and begin its episode."""

    number: int  # of the request
    environment: int
    start: EpisodeStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A request to answer an action."""

    number: int
    environment: int
    action: Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """A request to free an environment."""

    number: int
    environment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """A question whether the process still reads what it is sent."""

    number: int


Request = Reset | Step | Close


def max_answer_bytes(max_characters: int) -> int:
    """Return the longest line that an environment's process sends: its texts, as JSON escapes them, and the rest."""
    return 2**20 + 12 * max_characters


def to_json(observation: Any, max_characters: int) -> dict[str, Any]:
    """Check what an environment has returned and write it as JSON holds it, with long texts cut.

    Raises ValueError, naming what is wrong; TypeError for what JSON cannot hold.
    """
    if not isinstance(observation, Observation):
        raise ValueError(f"the environment returned {shown(observation)} and not an Observation")
    left = max_characters
    messages = []
    for message in observation.messages:
        _require_message(message)
        content, left = _cut(message["content"], left)
        messages.append(_valid_text({**message, "content": content}))
    written = {
        "messages": messages,
        "reward": _number("the reward", observation.reward),
        "done": bool(observation.done) if observation.done in (True, False) else observation.done,  # numpy's too
        "metrics": {name: _number(f"the metric {name}", value) for name, value in observation.metrics.items()},
        "tool_errors": observation.tool_errors,
        "state": None if observation.state is None else _valid_text(observation.state),
    }
    from_json(written)
    return written


def from_json(content: Any) -> Observation:
    """Read an observation, which a process may have made up. Raises ValueError if it is none."""
    if not isinstance(content, dict) or content.keys() != _OBSERVATION_KEYS:
        raise ValueError("the observation has not the form of one")
    messages, metrics = content["messages"], content["metrics"]
    if not isinstance(messages, list) or not isinstance(metrics, dict):
        raise ValueError("messages must be a list and metrics a mapping")
    for message in messages:
        _require_message(message)
    for name, kinds in (("done", bool), ("state", str | None), ("tool_errors", int)):
        if not isinstance(content[name], kinds):
            raise ValueError(f"{name} is {shown(content[name])}")
    if content["tool_errors"] < 0:
        raise ValueError(f"tool_errors is {content['tool_errors']}")
    _require_valid_text(content)
    return Observation(
        messages=tuple(messages),
        reward=_number("the reward", content["reward"]),
        done=content["done"],
        metrics={name: _number(f"the metric {name}", value) for name, value in metrics.items()},
        tool_errors=int(content["tool_errors"]),
        state=content["state"],
    )


def _require_message(message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is {shown(message)} and not a mapping with role and content")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise ValueError(f"a message's {name} is {shown(message.get(name))} and not a text")


def _number(what: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{what} is {shown(value)} and not a number")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}")
    return float(value)


def _cut(text: str, max_characters: int) -> tuple[str, int]:
    """Cut a text, with a note; returns it and how many characters the texts after it may have."""
    missing = len(text) - max_characters
    if missing <= 0:
        return text, -missing
    return f"{text[:max_characters]}\n[{missing} more characters are left out]", 0


def _valid_text(value: Any) -> Any:
    """Replace halves of surrogate pairs, which no tokenizer takes, in all texts of a JSON value."""
    match value:
        case str():
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        case Mapping():
            return {_valid_text(name): _valid_text(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_valid_text(inner) for inner in value]
    return value


def _require_valid_text(content: dict[str, Any]) -> None:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the observation's text has half of a surrogate pair") from error


def shown(value: Any) -> str:
    """Name a value in a message: its type, and its beginning."""
    beginning = repr(value[:60]) if isinstance(value, str | bytes) else reprlib.repr(value)
    return f"{type(value).__name__} {beginning}"
