"""Requests for an engine, numbered, and taken as there is room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spmdrl.types import Request


class RequestQueue:
    """Numbers requests in the order in which they are taken. None among them means: nothing to start now."""

    def __init__(self, requests: Iterable[Request | None]) -> None:
        self._requests = iter(requests)
        self._count = 0
        self._pausing = False
        self.is_empty = False

    def take(self, num_free: int) -> Iterator[tuple[int, Request]]:
        """Yield at most `num_free` requests with their places; none while the caller has nothing to start."""
        for _ in range(num_free):
            if self.is_empty or self._pausing:
                return
            try:
                request = next(self._requests)
            except StopIteration:
                self.is_empty = True
                return
            if request is None:
                self._pausing = True
                return
            yield self._count, request
            self._count += 1

    def ask_again(self) -> None:
        """Ask the caller for requests again: a response was given, or time has passed."""
        self._pausing = False
