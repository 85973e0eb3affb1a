"""Rows of the torch engine's cache whose requests have ended, and that may go on: an episode's environment is asked."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from spmdrl.engine.row_cache import RowContents
from spmdrl.types import ImageSpan


@dataclass(frozen=True, slots=True)
class Context:
    """The beginning that a first sampled token follows, and the weights that read it. Equal ones share a prefill."""

    version: int
    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...]  # by digest: placeholders alone do not say what they stand for

    @property
    def order(self) -> tuple[int, int, tuple[int, ...], tuple[str, ...]]:
        """The place of a context among others: short ones first."""
        return len(self.token_ids), self.version, self.token_ids, tuple(image.digest for image in self.images)

    def begins(self, other: Context) -> bool:
        """True when the other context is this one with more text."""
        length = len(self.token_ids)
        return (
            length < len(other.token_ids)
            and self.token_ids[-1] == other.token_ids[length - 1]  # most contexts differ here, and this is cheap
            and (self.version, self.images) == (other.version, other.images)
            and self.token_ids == other.token_ids[:length]
        )


@dataclass(frozen=True, slots=True)
class KeptRow:
    """A copy of the row that has read a context."""

    context: Context
    contents: RowContents

    @property
    def num_tokens(self) -> int:
        """The tokens of its context."""
        return len(self.context.token_ids)


class KeptRows:
    """The newest rows, of at most `max_tokens` tokens together; of older ones the context is read again.

    What is kept depends on the requests and on their order alone, so that a deterministic run repeats itself.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._rows: deque[KeptRow] = deque()

    def keep(self, row: KeptRow) -> None:
        """Keep a row, and forget the oldest ones if there are too many tokens."""
        self._rows.append(row)
        self._num_tokens += row.num_tokens
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= self._rows.popleft().num_tokens

    def take(self, context: Context) -> KeptRow | None:
        """Give up the row that has read most of a context; None where no row has read its beginning."""
        found = max(
            (row for row in self._rows if row.context.begins(context)),
            key=lambda row: row.num_tokens,
            default=None,
        )
        if found is not None:
            self._rows.remove(found)
            self._num_tokens -= found.num_tokens
        return found
