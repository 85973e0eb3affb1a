"""Rows that are whole conversations: fine-tuning imitates answers in them; what is rewarded has yet to be answered."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from spmdrl.conversation import Message, is_conversation, num_images
from spmdrl.data.images import ImageFile
from spmdrl.data.sources import Exchange, Row, question_in
from spmdrl.types import UserError


def asked(row: Row) -> Row:
    """Return a row that is to be answered. Raises UserError when its prompt ends with an answer."""
    if _ends_with_answer(row):
        raise UserError(
            f"{row.where}: the prompt ends with an assistant's message, so the policy would read an answer before it "
            "gives its own; end prompts with another role, or fine-tune on such rows without a response_column"
        )
    return row


def imitated(row: Row, *, turns: Literal["last", "all"]) -> Row:
    """Return a row with the responses to imitate: those of its column, or answers of its conversation.

    Of a conversation the last answer, or all of them. Raises UserError when a conversation cannot be divided so.
    """
    if row.response is not None or not _ends_with_answer(row):
        return _with_responses(asked(row))
    messages: list[dict[str, Any]] = list(row.prompt)  # type: ignore[arg-type]  # a string does not end with a message
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if turns == "last":
        answers = answers[-1:]
    starts = [0, *(place + 1 for place in answers[:-1])]
    if empty := [place for start, place in zip(starts, answers, strict=True) if start == place]:
        raise UserError(
            f"{row.where}: message {empty[0] + 1} of the conversation is an assistant's, and nothing precedes it that "
            'it could answer; merge it with the one before, remove it, or set sft.turns = "last"'
        )
    if any(messages[place].get("tool_calls") for place in answers):
        raise UserError(
            f"{row.where}: an assistant's message that is to be imitated has tool_calls, whose text only the model's "
            "chat template knows; write the calls into its content as the model should write them"
        )
    first, *others = _exchanges(messages, zip(starts, answers, strict=True), row.images)
    prompt = list(first.messages)
    return _with_responses(
        dataclasses.replace(
            row,
            prompt=prompt,
            images=first.images,
            question=question_in(prompt),
            response=first.response,
            later=tuple(others),
        )
    )


def _with_responses(row: Row) -> Row:
    """Return the row. Raises UserError for an empty response, of which only the end would be imitated."""
    if any(text is not None and not str(text).strip() for text in (row.response, *(one.response for one in row.later))):
        raise UserError(
            f"{row.where}: a response that is to be imitated is empty or white space, so that the policy would learn "
            "to end at once; write one, or remove the row"
        )
    return row


def _exchanges(
    messages: Sequence[Message], spans: Iterable[tuple[int, int]], images: Iterable[ImageFile]
) -> Iterator[Exchange]:
    """Yield the messages from each start to its answer, with those of the images that have their places there."""
    remaining = iter(images)
    for start, place in spans:
        said = tuple(messages[start:place])
        shown = tuple(itertools.islice(remaining, sum(map(num_images, said))))
        yield Exchange(said, messages[place]["content"], shown)


def _ends_with_answer(row: Row) -> bool:
    return is_conversation(row.prompt) and row.prompt[-1]["role"] == "assistant"
