"""An agent's call of the policy, whichever form of OpenAI's it came in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from spmdrl.config.strict import MAX_DEPTH, depth
from spmdrl.conversation import Action, Message
from spmdrl.data.turns import message_of

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


# Where an agent's call goes on: the deepest recorded conversation that its messages begin with.
#
# Trajectories are numbered as the episode numbers them: each call that does not go on after the last turn begins one.


_APPENDED_ROLES = ("user", "tool")  # after a response; other messages are rendered with the whole conversation

Key = tuple[str, ...]  # what a message says, however a client writes it


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a call among the trajectories."""

    branch: tuple[int, int] | None  # as in `Observation`; (0, 0) is the beginning
    messages: tuple[Message, ...]  # those after it


@dataclass(slots=True)
class _Trajectory:
    tools: tuple[dict[str, Any], ...]
    turns: list[tuple[Key, ...]] = field(default_factory=list)  # the conversation up to and with each response


class Branches:
    """The conversations of one episode."""

    def __init__(self) -> None:
        self._trajectories: list[_Trajectory] = []
        self._asked: tuple[Key, ...] = ()

    def place(self, call: Call) -> Place:
        """Find the place of a call, and go on there."""
        self._asked = tuple(_key(message) for message in call.messages)
        depth, index, num_turns = max(self._matches(call), default=(0, 0, 0))
        if (index, num_turns) == self._end and depth:
            return Place(None, call.messages[depth:])
        self._trajectories.append(_Trajectory(call.tools))
        return Place((index, num_turns), call.messages[depth:])

    def add(self, action: Action) -> None:
        """Record the policy's answer to the call that was placed last."""
        self._trajectories[-1].turns.append((*self._asked, _key(message_of(action))))

    @property
    def _end(self) -> tuple[int, int]:
        """The last trajectory, and the number of its turns."""
        return len(self._trajectories) - 1, len(self._trajectories[-1].turns) if self._trajectories else 0

    def _matches(self, call: Call) -> list[tuple[int, int, int]]:
        """The recorded conversations that the call can be appended to: messages, trajectory, its turns."""
        can_append = len(call.messages)  # from here on there are only messages that can follow a response
        while can_append and call.messages[can_append - 1]["role"] in _APPENDED_ROLES:
            can_append -= 1
        return [
            (len(said), index, num_turns)
            for index, trajectory in enumerate(self._trajectories)
            if trajectory.tools == call.tools
            for num_turns, said in enumerate(trajectory.turns, start=1)
            if can_append <= len(said) < len(self._asked) and self._asked[: len(said)] == said
        ]


def _key(message: Message) -> Key:
    """Return what identifies a message. Clients trim answers, and write a call's arguments in their own way."""
    content = message["content"]
    if message["role"] != "assistant":
        return message["role"], content
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "assistant", content.strip(), *(json.dumps([c["name"], c["arguments"]], sort_keys=True) for c in calls)
