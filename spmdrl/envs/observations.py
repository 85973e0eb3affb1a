"""Observations as they travel from a process to its rank: checked on both sides, cut, and valid text."""

from __future__ import annotations

import json
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any

from spmdrl.conversation import Observation
from spmdrl.workers.bounds import bounded

_KEYS = {"messages", "reward", "done", "metrics", "tool_errors", "state"}
MAX_METRICS = 100  # of one step
_MAX_NAME_CHARACTERS = 100
_MAX_TOOL_ERRORS = 2**31  # of one step: what is larger is a mistake, and might fit no float


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
        "metrics": numbers_of(observation.metrics),
        "tool_errors": observation.tool_errors,
        "state": None if observation.state is None else _valid_text(observation.state),
    }
    from_json(written)
    return written


def from_json(content: Any) -> Observation:
    """Read an observation, which a process may have made up. Raises ValueError if it is none."""
    if not isinstance(content, dict) or content.keys() != _KEYS:
        raise ValueError("the observation has not the form of one")
    messages, metrics = content["messages"], content["metrics"]
    if not isinstance(messages, list) or not isinstance(metrics, dict):
        raise ValueError("messages must be a list and metrics a mapping")
    for message in messages:
        _require_message(message)
    for name, kinds in (("done", bool), ("state", str | None), ("tool_errors", int)):
        if not isinstance(content[name], kinds):
            raise ValueError(f"{name} is {shown(content[name])}")
    if not 0 <= content["tool_errors"] <= _MAX_TOOL_ERRORS:
        raise ValueError(f"tool_errors is {reprlib.repr(content['tool_errors'])}")
    _require_valid_text(content)
    return Observation(
        messages=tuple(messages),
        reward=_number("the reward", content["reward"]),
        done=content["done"],
        metrics=numbers_of(metrics),
        tool_errors=int(content["tool_errors"]),
        state=content["state"],
    )


def _require_message(message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is {shown(message)} and not a mapping with role and content")
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise ValueError(f"a message's {name} is {shown(message.get(name))} and not a text")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
        raise ValueError(
            f'a message\'s tool_calls are {shown(calls)} and not a list of {{"function": {{"name": TEXT, "arguments": '
            "MAPPING}}"
        )


def _is_call(call: Any) -> bool:
    match call:
        case {"function": {"name": str(), "arguments": Mapping()}}:
            return True
    return False


def _number(what: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{what} is {shown(value)} and not a number")
    return bounded(what, value)


def numbers_of(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Check metrics, which get a place among the run's own. Raises ValueError, naming what is wrong."""
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"there are {len(metrics)} metrics, more than {MAX_METRICS}")
    for name in metrics:
        if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= _MAX_NAME_CHARACTERS:
            raise ValueError(
                f"a metric's name is {shown(name)} and not printable text of at most {_MAX_NAME_CHARACTERS} characters"
            )
    return {name: _number(f"the metric {name}", value) for name, value in metrics.items()}


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
