"""The requests a caller has for an engine, numbered, taken as there is room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spmdrl.types import Request


class RequestQueue:
    """Requests in the order they are asked for. None among them says: nothing to start now."""

    def __init__(self, requests: Iterable[Request | None]) -> None:
        self._requests = iter(requests)
        self._count = 0
        self._pausing = False
        self.is_empty = False

    def take(self, num_free: int) -> Iterator[tuple[int, Request]]:
        """At most `num_free` of them with their places; none while the caller has none to start."""
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
        """A response was given, or time has passed: the caller may have something to start."""
        self._pausing = False
