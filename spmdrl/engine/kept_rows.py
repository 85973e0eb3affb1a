"""Copies of cache rows whose request has ended, for the next request of an episode that waits for its environment."""

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
            and self.version == other.version
            and self.images == other.images
            and self.token_ids == other.token_ids[:length]
        )


@dataclass(frozen=True, slots=True, eq=False)
class KeptRow:
    """A copy of the row that has read a context."""

    context: Context
    contents: RowContents


class KeptRows:
    """The newest rows that fit into `max_bytes`; the context of one that had to go is read again.

    What is kept depends on the requests and on their order alone, so that a deterministic run repeats itself.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._rows: deque[KeptRow] = deque()

    def make_room(self, num_bytes: int) -> bool:
        """Forget the oldest rows until `num_bytes` more fit; return False where they never would."""
        if num_bytes > self._max_bytes:
            return False
        while self._num_bytes + num_bytes > self._max_bytes:
            self._forget(self._rows[0])
        return True

    def keep(self, row: KeptRow) -> None:
        """Keep a row, for which there is room."""
        self._rows.append(row)
        self._num_bytes += row.contents.num_bytes

    def take(self, context: Context) -> KeptRow | None:
        """Give up the row that has read most of a context; None where no row has read its beginning.

        Rows that other weights have read are forgotten: no later request is for those weights.
        """
        for row in [row for row in self._rows if row.context.version != context.version]:
            self._forget(row)
        begun = (row for row in self._rows if row.context.begins(context))
        found = max(begun, key=lambda row: len(row.context.token_ids), default=None)
        if found is not None:
            self._forget(found)
        return found

    def _forget(self, row: KeptRow) -> None:
        self._rows.remove(row)
        self._num_bytes -= row.contents.num_bytes
