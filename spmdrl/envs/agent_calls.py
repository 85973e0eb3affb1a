"""An agent's call of the policy, whichever form of OpenAI's it came in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from spmdrl.config.strict import MAX_DEPTH, depth
from spmdrl.conversation import Action, Message

MODEL = "policy"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class CallError(ValueError):
    """The reason why a call cannot be answered, for the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A conversation that the policy is to continue. Ids of calls are left out: the policy has never seen any."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]  # JSON schemas, as chat templates take them
    max_tokens: int | None
    stops: tuple[str, ...] = ()  # texts that end what the agent reads; the policy has sampled on

    def cut(self, action: Action) -> Action:
        """Return the action as this call wants to read it: without the first stop and what follows it."""
        ends = [action.text.find(stop) for stop in self.stops if stop and stop in action.text]
        return replace(action, text=action.text[: min(ends)]) if ends else action


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The policy's answer to a call."""

    number: int  # of the episode's replies, from 0
    action: Action

    def call_id(self, place: int) -> str:
        """Return the id of a call of a tool. It is the same when the episode is played again."""
        return f"c{self.number:04}x{place:03}"


class Form(Protocol):
    """One of OpenAI's two forms."""

    def read(self, body: dict[str, Any]) -> Call:
        """Read the body of a request. Raises CallError."""

    def write(self, reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the response to a request."""

    def events(self, response: dict[str, Any], body: dict[str, Any]) -> list[tuple[str | None, dict[str, Any]]]:
        """Return the same as server-sent events: their names, if they have any, and their data."""


def make_call(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], max_tokens: Any, *, stops: Sequence[Any] = ()
) -> Call:
    """Put a call together. Raises CallError when the policy cannot answer such a one."""
    if not messages:
        raise CallError("the conversation has no message")
    if messages[-1]["role"] == "assistant":
        raise CallError("the last message must not be the assistant's: answers are not continued")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise CallError(f"the limit of tokens must be a positive number, not {max_tokens!r}")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise CallError("two tools have the same name")
    if not all(isinstance(stop, str) for stop in stops):
        raise CallError("stop must be a text or a list of texts")
    return Call(messages=tuple(messages), tools=tuple(tools), max_tokens=max_tokens, stops=tuple(stops))


def refuse_settings(body: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CallError for a setting whose value is neither null nor among the ones allowed."""
    for name, values in allowed.items():
        value = body.get(name)
        if value is not None and value not in values:
            either = " or ".join(json.dumps(one) for one in values)
            raise CallError(
                f"{name} = {json.dumps(value)[:80]} is not supported; leave it out"
                + (f" or set it to {either}" if either else "")
            )


def text_of(content: Any) -> str:
    """Join the text of a message's content. Raises CallError for images and the like."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_text(part) for part in content)
    raise CallError("a message's content must be a text or a list of texts")


def _part_text(part: Any) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise CallError(f"content of the type {str(kind)[:40]!r} is not supported; the policy reads text")


def tool_of(function: Any) -> dict[str, Any]:
    """Return a function's description as a tool's schema for chat templates. Raises CallError."""
    match function:
        case {"name": str(name)} if name:
            known = {key: function[key] for key in ("description", "parameters") if function.get(key) is not None}
            if depth(known) > MAX_DEPTH:
                raise CallError(f"the description of a tool is nested more than {MAX_DEPTH} deep")
            return {"type": "function", "function": {"name": name, "description": "", "parameters": {}} | known}
    raise CallError("a tool must be a function with a name")


def tool_call_of(name: Any, arguments: Any) -> dict[str, Any]:
    """Return an assistant's call of a tool, with its arguments parsed. Raises CallError."""
    try:
        parsed = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        parsed = None
    if not isinstance(name, str) or not isinstance(parsed, dict):
        raise CallError("a call of a tool needs a name, and arguments that are a JSON object")
    if depth(parsed) > MAX_DEPTH:
        raise CallError(f"the arguments of a call of a tool are nested more than {MAX_DEPTH} deep")
    return {"type": "function", "function": {"name": name, "arguments": parsed}}
