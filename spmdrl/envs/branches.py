"""Where an agent's call goes on: the deepest recorded conversation that its messages begin with.

Trajectories are numbered as the episode numbers them: each call that does not go on after the last turn begins one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from spmdrl.conversation import Action, Message
from spmdrl.data.turns import message_of
from spmdrl.envs.agent_calls import Call

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
