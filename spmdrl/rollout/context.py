"""Conversations of which not all turns stand whole any more: what `[environment.context]` leaves of the others.

before   prompt, response, observation, response, observation, ...
summary  prompt with a summary, which the policy has written when it was asked to,  the last turns
notes    prompt with the notes that are in the responses,                           the last turns
truncate prompt, response, placeholder, response, placeholder, ...,                 the last turns
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from spmdrl.config.environment import ContextConfig, NotesContext, SummaryContext, TruncateContext
from spmdrl.conversation import Message, joined
from spmdrl.data.turns import message_of
from spmdrl.types import Turn

_END_OF_THINKING = "</think>"


def conversation(
    opening: Sequence[Message], turns: Sequence[Turn], num_left_out: int, context: ContextConfig | None
) -> list[Message]:
    """Return the messages of a conversation, of whose turns without summaries the first `num_left_out` are rewritten.

    `opening` are the messages before the first response, of which nothing is left out.
    """
    acted = [turn for turn in turns if not turn.is_summary]
    left_out, messages = acted[:num_left_out], list(opening)
    match context:
        case SummaryContext() if left_out:
            messages = asked(messages, context.heading + _summary(turns))
        case NotesContext() if found := "\n".join(note for turn in left_out for note in _notes(turn, context.pattern)):
            messages = asked(messages, context.heading + found)
        case TruncateContext():
            messages += [one for turn in left_out for one in _messages(turn, context.placeholder)]
    return messages + [one for turn in acted[num_left_out:] for one in _messages(turn, None)]


def asked(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with a text of a user's, which continues a last message of that role: many templates refuse
    two in a row."""
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], messages[-1] | {"content": joined(messages[-1]["content"], text)}]
    return [*messages, {"role": "user", "content": text}]


def without_thinking(text: str) -> str:
    """Return what a response says after it has thought."""
    return text.rpartition(_END_OF_THINKING)[2].strip()


def num_to_leave_out(turns: Sequence[Turn], context: ContextConfig) -> int:
    """Return how many of the first turns, without summaries, are rewritten if any are."""
    return max(0, sum(not turn.is_summary for turn in turns) - context.keep_turns)


def is_due(context: ContextConfig, turns: Sequence[Turn], num_left_out: int, num_tokens: int) -> bool:
    """True when a conversation with this number of tokens after its prompt is to be rewritten, and there is something
    to leave out."""
    is_long = context.max_tokens is None or num_tokens > context.max_tokens
    return is_long and num_to_leave_out(turns, context) > num_left_out


def _summary(turns: Sequence[Turn]) -> str:
    """Return the text of the last summary."""
    *_, last = (turn.action.text for turn in turns if turn.is_summary and turn.action is not None)
    return last


def _notes(turn: Turn, pattern: str) -> list[str]:
    found = re.finditer(pattern, turn.action.text if turn.action else "", re.DOTALL)
    return [match[min(1, len(match.groups()))] or "" for match in found]


def _messages(turn: Turn, placeholder: str | None) -> list[Message]:
    """Return a turn's response and observation, the latter with a placeholder for its contents if there is one."""
    said = list(turn.observation.messages) if turn.observation is not None else []
    if placeholder is not None:
        said = [message | {"content": placeholder} for message in said]
    return [*([message_of(turn.action)] if turn.action is not None else ()), *said]
