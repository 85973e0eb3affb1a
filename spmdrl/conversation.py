"""The nouns of an episode's conversation, between a policy and its environment, and what settings need of all nouns.

Environment processes import this module, so it imports nothing beyond Python.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeGuard


class UserError(ValueError):
    """A user's request that cannot be met. The message says what was set, what is true, and what to set instead."""


NO_TEACHER = -1  # in place of a teacher's place in the settings: of a sequence that is not distilled

Message = dict[str, Any]  # of a chat, as transformers' chat templates take it: "role", "content", perhaps "tool_calls"

IMAGE_PLACE = "<image>"  # in a text for people to read; in data too, where a row has a column of images


def as_text(content: Any) -> str:
    """Return a message's content for people to read: a string, or texts and images in parts."""
    if not isinstance(content, list):
        return str(content)
    return "".join(part["text"] if part["type"] == "text" else IMAGE_PLACE for part in content)


def num_images(message: Message) -> int:
    """Count the places for images in a message."""
    content = message["content"]
    return sum(part["type"] == "image" for part in content) if isinstance(content, list) else 0


def joined(first: Any, second: Any) -> Any:
    """Return two contents as one: strings, or texts and images in parts."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def is_conversation(prompt: str | list[dict[str, Any]]) -> TypeGuard[list[Message]]:
    """Return True for chat messages, False for a string or the parts of a text with images."""
    return not isinstance(prompt, str) and "role" in prompt[0]


class _InBase64:
    """Marks bytes that JSON holds in base64. Pydantic asks for this; a process without it never does."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(
            lambda value: base64.b64decode(value) if isinstance(value, str) else value,
            core_schema.bytes_schema(),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: base64.b64encode(value).decode(), when_used="json"
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the policy wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One response of the policy, as its environment reads it."""

    text: str  # without special tokens; calls that were parsed are left out
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str | None = None  # why something that begins like a call is none
    is_cut: bool = False  # it ends where an agent's own limit of tokens was reached
    num_context_tokens: int = field(default=0, compare=False)  # before the response
    num_tokens: int = field(default=0, compare=False)  # in the response


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """An environment's answer to a reset or to an action."""

    messages: tuple[Message, ...] = ()  # what the policy reads next; may be empty where `done`
    reward: float = 0.0  # for the action
    done: bool = False  # the episode is over
    metrics: Mapping[str, float] = field(default_factory=dict)  # averaged over episodes: environment/NAME
    tool_errors: int = 0  # calls that failed
    state: str | None = None  # names the state, for step groups; None: the messages and their images do
    # Files of the images in the messages, in order. In an environment's process parts of messages hold the images
    # themselves; on their way to the rank places are left of them.
    images: tuple[Annotated[bytes, _InBase64()], ...] = ()
    role: str | None = None  # in which the policy acts next, where it plays several
    role_rewards: Mapping[str, float] = field(default_factory=dict)  # of roles that have acted, besides `reward`
    # What follows is for agents, which say with each call what the conversation is.
    branch: tuple[int, int] | None = None  # the messages follow this many first turns of the trajectory; None: the last
    tools: tuple[dict[str, Any], ...] | None = None  # schemas of what can be called from now on; None: as for everyone
    max_tokens: int | None = None  # of the next response


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """The input of a reset: the prompt's data, and a seed for everything random about the episode."""

    prompt: str  # the question, as text
    answer: str | None
    task: str
    metadata: dict[str, Any]
    seed: int  # 63 bits
