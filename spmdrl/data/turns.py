"""Tokens of turns (stand-in until the real module is merged)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spmdrl.conversation import Action, Message


class TurnEncoder:
    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: Literal["auto", "never"],
        tools: Sequence[dict[str, Any]],
        stop_token_ids: frozenset[int],
    ) -> None:
        raise NotImplementedError

    def first(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], str]:
        raise NotImplementedError

    def appended(self, messages: Sequence[Message], *, after: tuple[int, ...]) -> tuple[int, ...]:
        raise NotImplementedError

    def rendered(self, messages: Sequence[Message]) -> tuple[int, ...]:
        raise NotImplementedError

    def message_of(self, action: Action) -> Message:
        raise NotImplementedError

    def problems(self, roles: Sequence[str]) -> Iterator[str]:
        raise NotImplementedError
