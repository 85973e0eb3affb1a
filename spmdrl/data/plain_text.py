"""Text that stays text: what others wrote never becomes a control token of the model.

A tokenizer gives a control token such as `<|im_end|>` wherever its text stands. Before a conversation is rendered, a
mark is put inside every such text in the messages' contents, where no template trims it; after rendering, the text is
encoded in pieces that end at the marks, so that no piece holds the whole text of a control token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.conversation import Message
from spmdrl.types import UserError

_FIELDS = ("role", "content", "type", "name")  # which nearly every message has; no control token is spelt so
_PRIVATE_USE = range(0xE000, 0xF900)  # characters that mean nothing, and that templates neither trim nor change


def free_characters(*taken: str) -> Iterator[str]:
    """Yield private-use characters that occur in none of the texts, nor as JSON's `\\\\uXXXX`.

    Raises UserError when there are no more.
    """
    text = "".join(taken)
    for number in _PRIVATE_USE:
        if chr(number) not in text and f"\\u{number:04x}" not in text:
            yield chr(number)
    raise UserError("the text has all of Unicode's private-use characters, one of which must be left to mark places")


def texts_in(value: Any) -> Iterator[str]:
    """Yield the strings in a message or in a part of one, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in(list(value) + list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts_in(part)


def unescaped(text: str, marks: Iterable[str]) -> str:
    """Return the text with marks in place of their `\\\\uXXXX`, as which some templates write them in JSON."""
    for mark in marks:
        text = text.replace(f"\\u{ord(mark):04x}", mark)
    return text


class PlainText:
    """Encodes rendered conversations in which marks keep the texts of control tokens apart.

    Control tokens are the tokenizer's added tokens, without those of white space or of one character, which stand for
    ordinary text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        control = {number: token for number, token in added.items() if len(token.content.strip()) > 1}
        self.control_ids = frozenset(control)
        special = {number: token for number, token in control.items() if token.special}
        # Others stand in a text only as they are spelt.
        self._any_normalized = any(token.normalized for token in control.values())
        self._special_ids = frozenset(special)
        self._any = _one_of(token.content for token in control.values())
        self._special = _one_of(token.content for token in special.values())
        # Some tokenizers put a space before a text; not behind an added token.
        whole = [token.content for token in special.values() if not (token.rstrip or token.single_word)]
        self._anchor = whole[0] if whole else ""

    def marked(self, message: Message, mark: str) -> Message:
        """Return the message with marks inside the texts of control tokens.

        In an assistant's message only those of special tokens: the policy's other added tokens, such as `<think>`, are
        decoded to text, and templates look for them.
        """
        own = message.get("role") == "assistant"
        pattern, ids = (self._special, self._special_ids) if own else (self._any, self.control_ids)
        return _changed(message, lambda text: self._broken(text, mark, pattern, ids))

    def _broken(self, text: str, mark: str, pattern: re.Pattern[str], ids: frozenset[int]) -> str:
        valid = _whole(text)
        if not self._any_normalized and not pattern.search(valid):
            return valid
        broken = pattern.sub(lambda found: found[0][:1] + mark + found[0][1:], valid)
        # What is left are control texts that overlap, or that only the tokenizer's normalization makes.
        pieces = [mark.join(piece) if ids & set(self._encoded(piece)) else piece for piece in broken.split(mark)]
        return mark.join(pieces)

    def special_text_in(self, text: str) -> str | None:
        """Return the first text of a special token in a text; None if there is none."""
        found = self._special.search(text)
        return found[0] if found else None

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Encode a text in which the texts of control tokens are control tokens."""
        return tuple(self._encoded(_whole(text)))

    def encode(self, text: str, mark: str) -> tuple[int, ...]:
        """Encode a rendered text in pieces that end at the marks."""
        first, *others = text.split(mark)
        token_ids = list(self._encoded(first))
        for piece in others:
            token_ids += self._encoded(self._anchor + piece)[1 if self._anchor else 0 :]
        return tuple(token_ids)

    def _encoded(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, and no Exception
                raise
            raise UserError(
                f"the tokenizer cannot encode a text of {len(text)} characters: {' '.join(str(error).split())}; give "
                "tokenizer.json another pattern, or remove the text"
            ) from error


def plain_text_of(tokenizer: PreTrainedTokenizerBase) -> PlainText:
    """Return a tokenizer's encoder of plain text, made once for the tokens that it has."""
    return _made(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _made(tokenizer: PreTrainedTokenizerBase, _num_tokens: int) -> PlainText:
    return PlainText(tokenizer)


def _whole(text: str) -> str:
    """Return the text with a replacement character for half of one, which no tokenizer takes."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """Return the value with every string in it changed, names of fields included, but for roles and types."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key if key in _FIELDS else change(key): part if key in ("role", "type") else _changed(part, change)
            for key, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(part, change) for part in value]
    return value
