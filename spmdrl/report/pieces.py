"""Tokens as text to be shown: one piece of the text for each token, and who wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

Writer = Literal["prompt", "environment", "policy"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's answer to some of a character's bytes
_LONGEST_CHARACTER = 4  # bytes in UTF-8, so tokens too


class TokenTexts:
    """The texts of a tokenizer's tokens; those it has looked up once it knows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}  # texts of single tokens

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Cut the text of the tokens into a piece for each of them. A character that several tokens share is in the
        first one's piece; the others' are empty."""
        pieces: list[str] = []
        while len(pieces) < len(token_ids):
            start = len(pieces)
            for end in range(start + 1, min(start + _LONGEST_CHARACTER, len(token_ids)) + 1):
                text = self._text(token_ids[start:end])
                if _UNFINISHED not in text:
                    break
            else:  # bytes that are no character
                end, text = start + 1, self._text(token_ids[start : start + 1])
            pieces += [text, *[""] * (end - start - 1)]
        return pieces

    def _text(self, token_ids: Sequence[int]) -> str:
        first = token_ids[0]
        if len(token_ids) > 1:
            return self._decoded(token_ids)
        if first not in self._known:
            self._known[first] = self._decoded(token_ids)
        return self._known[first]

    def _decoded(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._tokenizer
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        first = tokenizer.convert_ids_to_tokens(token_ids[0])
        # SentencePiece decodes the first token of a text without the space that it begins with.
        return f" {text}" if isinstance(first, str) and first.startswith("▁") and not text.startswith(" ") else text


def writers_of_context(pieces: Sequence[str], said: Iterable[tuple[str, Writer]]) -> list[Writer]:
    """Tell of each token that the policy read whether the environment wrote it.

    `said` are the texts in it, in order, and who wrote them. All else is the chat template's, which counts as the
    prompt. So does a text that the template has changed, because it is not found.
    """
    spans = list(_spans("".join(pieces), said))
    writers: list[Writer] = []
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        if not piece:  # of the character before it
            writers.append(writers[-1] if writers else "prompt")
        else:
            by_environment = any(start < end and begin < stop for start, stop in spans)
            writers.append("environment" if by_environment else "prompt")
        begin = end
    return writers


def _spans(text: str, said: Iterable[tuple[str, Writer]]) -> Iterator[tuple[int, int]]:
    """Yield where each text of the environment begins and ends, as far as it is there after the one before."""
    begin = 0
    for words, writer in said:
        for form in (words, words.strip()):  # many templates strip
            place = text.find(form, begin) if form else -1
            if place >= 0:
                begin = place + len(form)
                if writer == "environment":
                    yield place, begin
                break
