"""Messages as data has them: contents in parts with images, and pairs of answers of which one is preferred."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from spmdrl.conversation import IMAGE_PLACE, Message, as_text
from spmdrl.data.image_forms import Content, source_of, text_of
from spmdrl.data.images import ImageFile
from spmdrl.types import UserError

# Contents of messages that are text and images, in parts: how data writes them, and how prompts have them.
#
# Here a message's content is a string, or, where it has images, a list of `{"type": "text", "text": ...}` and
# `{"type": "image"}`; the images themselves stand next to the prompt, in order.


class PartReader:
    """Reads the contents of one row's messages, and gathers their images in order."""

    def __init__(self, column: Sequence[ImageFile] | None, read: Callable[[Any], ImageFile]) -> None:
        """`column` holds the images of the row's column, None where there is none; `read` those that parts name."""
        self.images: list[ImageFile] = []
        self._has_column = column is not None
        self._column = list(column or ())
        self._num_places = 0
        self._read = read

    def content(self, value: Content) -> Content:
        """Return a content with its images as places. Raises UserError."""
        parts = list(self._split(value))
        if None in parts:
            return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in parts]
        return "".join(text for text in parts if text is not None)

    def message(self, message: Message) -> Message:
        """Return a message with its images as places."""
        content = self.content(message["content"])
        if message["role"] == "assistant" and not isinstance(content, str):
            raise UserError("an assistant's message has an image, and models write none")
        return message | {"content": content}

    def require_all_used(self) -> None:
        """Raise UserError unless the prompt has a place for each image of the column."""
        if self._num_places != len(self._column):
            raise UserError(
                f"the prompt has {self._num_places} places for images ({IMAGE_PLACE}, or parts of the type image), and "
                f"its column of images holds {len(self._column)}"
            )

    def _split(self, value: Content) -> Iterator[str | None]:
        """Yield texts, and None for each image, which is gathered."""
        if isinstance(value, str):
            first, *others = value.split(IMAGE_PLACE) if self._has_column else [value]
            yield from (first,) if first or not others else ()
            for text in others:
                self._take()
                yield None
                yield from (text,) if text else ()
            return
        for part in value:
            try:
                written = text_of(part)
            except ValueError as error:
                raise UserError(str(error)) from error
            if written is None:
                self._take(source_of(part))
            yield written

    def _take(self, source: Any = None) -> None:
        if source is not None:
            self.images.append(self._read(source))
            return
        self._num_places += 1
        if not self._has_column:
            raise UserError("a part of the type image has no image; set image_column to the column that has it")
        if self._num_places <= len(self._column):
            self.images.append(self._column[self._num_places - 1])


# Rows of preferences: a prompt and two answers to it, in the forms in which such data sets are written.
#
# | prompt column | answers | prompt |
# |---|---|---|
# | text or messages | texts | the column |
# | text or messages | messages, the first an assistant's | the column |
# | text or messages, or none | messages of whole conversations | the messages before the first answer that differs |
# | none | texts | what both begin with, to the end of a word |


Answered = tuple[tuple[Message, ...], str]  # messages to the policy, none before its first answer; and what it answers


class Comparison(NamedTuple):
    """A prompt, and what follows it in either case."""

    prompt: str | list[dict[str, Any]]
    chosen: tuple[Answered, ...]
    rejected: tuple[Answered, ...]


def compared(prompt: str | list[dict[str, Any]] | None, chosen: Any, rejected: Any) -> Comparison:
    """Divide a row into prompt and answers; `prompt` is that of its column, None without one.

    Raises UserError when the answers are no answers to one prompt, are empty, or are equal.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        if chosen == rejected:
            raise UserError(_EQUAL)
        if prompt is None:
            prompt, chosen, rejected = _shared_start(chosen, rejected)
        return Comparison(prompt, *(_answered([{"role": "assistant", "content": text}]) for text in (chosen, rejected)))
    if not (_is_messages(chosen) and _is_messages(rejected)):
        raise UserError(
            "the two answers must both be strings, or both be lists of chat messages "
            f'{{"role": ..., "content": ...}}, but they are {_shown(chosen)} and {_shown(rejected)}'
        )
    if chosen == rejected:
        raise UserError(_EQUAL)
    if chosen[0]["role"] == "assistant" and rejected[0]["role"] == "assistant" and prompt is not None:
        return Comparison(prompt, _answered(chosen), _answered(rejected))
    length = _num_common(chosen, rejected)
    start, endings = chosen[:length], (chosen[length:], rejected[length:])
    if not start or not all(ending and ending[0]["role"] == "assistant" for ending in endings):
        raise UserError(
            "the two conversations do not differ first in an assistant's message after a prompt, so that they do not "
            "compare two answers; remove the row"
        )
    _require_said(prompt, start)
    return Comparison(start, *map(_answered, endings))


_EQUAL = "the chosen and the rejected answer are equal, so that nothing is preferred; remove the row"


def _shared_start(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Return what two texts begin with, to the end of a word, and the rest of each."""
    end = re.search(r"\s+\S*$", chosen[: _num_common(chosen, rejected)])
    if end is None or not chosen[: end.start()].strip():
        raise UserError(
            "the two answers do not begin with the same prompt; set prompt_column to the column that has it, or remove "
            "the row"
        )
    return chosen[: end.start()], chosen[end.start() :], rejected[end.start() :]


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the characters or messages with which both begin."""
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def _require_said(prompt: str | list[dict[str, Any]] | None, start: Sequence[Message]) -> None:
    """Raise UserError when the column of prompts has something else than the conversations begin with."""
    if prompt is None or prompt == list(start):
        return
    if isinstance(prompt, str) and any(as_text(message["content"]).strip() == prompt.strip() for message in start):
        return
    raise UserError(
        'the answers are whole conversations, which do not begin with its prompt; set prompt_column = "" to take the '
        "prompt from them, or begin the answers with the assistant's message"
    )


def _answered(messages: Sequence[Message]) -> tuple[Answered, ...]:
    """Divide messages, the first an assistant's, into answers with the messages before each."""
    parts: list[Answered] = []
    said: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            said.append(message)
            continue
        if parts and not said:
            raise UserError("an assistant's message follows another in an answer; merge the two, or remove the row")
        if message.get("tool_calls"):
            raise UserError(
                "an answer has tool_calls, whose text only the model's chat template knows; write the calls into its "
                "content as the model should write them"
            )
        if not (text := _text_of(message["content"])).strip():
            raise UserError("an answer is empty or white space; write one, or remove the row")
        parts.append((tuple(said), text))
        said = []
    if said:
        raise UserError(f'an answer ends with a message of role "{said[-1]["role"]}"; end it with the assistant\'s')
    return tuple(parts)


def _text_of(content: Any) -> str:
    if isinstance(content, list) and any(part.get("type") != "text" for part in content):
        raise UserError("there is an image after the prompt, and only prompts show images; remove it, or the row")
    return as_text(content)


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_message(one) for one in value)


def is_message(value: Any) -> bool:
    """Return True for a chat message: a role, and a content of text or parts."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str | list)


def _shown(value: Any) -> str:
    return f"{type(value).__name__}: {str(value)[:60]!r}"
