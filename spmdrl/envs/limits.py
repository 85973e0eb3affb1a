"""Limits of the endpoint: the connections that are open, and the bytes of requests that are being answered."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

MAX_CONNECTIONS = 1024
HEAD_S = 5  # for a connection's first request with a key
MAX_BYTES_OF_A_KEY = 32 * 2**20
MAX_BYTES = 128 * 2**20


def max_connections() -> int:
    """Return a quarter of the descriptors that this process may open, so that the rank always has its own."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(min(limit // 4, MAX_CONNECTIONS), 8)


class NoRoom(Exception):
    """Every connection with a key has a request that is being answered."""


@dataclass(slots=True)
class _Stranger:
    seconds: int = 0
    is_refused: bool = False


class Connections:
    """The open connections. Those that have shown a key and strangers have room apart, so neither takes the other's.

    Where the room is used up, the oldest stranger is hung up on, or the connection with a key that has been idle
    longest. All of it belongs to one asyncio loop.
    """

    def __init__(self, most: int) -> None:
        self.num_silent = 0  # strangers that were hung up on before they had sent a request
        self._most_strangers = most // 4
        self.most_with_key = most - self._most_strangers
        self._strangers: dict[asyncio.BaseTransport, _Stranger] = {}  # the oldest first
        self._idle: dict[asyncio.BaseTransport, None] = {}  # the one that has been idle longest first
        self._busy: set[asyncio.BaseTransport] = set()

    def add(self, transport: asyncio.BaseTransport) -> None:
        """Count a new connection among the strangers."""
        self._forget_closed()
        self._strangers[transport] = _Stranger()
        if len(self._strangers) > self._most_strangers:
            self._hang_up(next(iter(self._strangers)))

    @contextlib.contextmanager
    def answering(self, transport: asyncio.BaseTransport) -> Iterator[None]:
        """Count a connection that has shown a key, which is not idle inside of this. Raises NoRoom."""
        self._idle.pop(transport, None)
        if len(self._busy) + len(self._idle) >= self.most_with_key:
            self._forget_closed()
        if len(self._busy) >= self.most_with_key:
            raise NoRoom
        if len(self._busy) + len(self._idle) >= self.most_with_key:
            self._hang_up(next(iter(self._idle)))
        self._strangers.pop(transport, None)
        self._busy.add(transport)
        try:
            yield
        finally:
            self._busy.discard(transport)
            self._idle[transport] = None

    def is_strangers(self, transport: asyncio.BaseTransport) -> bool:
        """Return True for a connection that has shown no key. It is not silent: a request of it is being refused."""
        if transport in self._strangers:
            self._strangers[transport].is_refused = True
        return transport not in self._idle

    def tick(self) -> None:
        """Let a second pass. Seconds are counted, not measured: a loop that was blocked hangs up on nobody."""
        self._forget_closed()
        for transport, stranger in list(self._strangers.items()):
            stranger.seconds += 1
            if stranger.seconds > HEAD_S:
                self._hang_up(transport)

    def _hang_up(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._idle.pop(transport, None)
        if (stranger := self._strangers.pop(transport, None)) is not None:
            self.num_silent += not stranger.is_refused
        transport.abort()

    def _forget_closed(self) -> None:
        for open_ones in (self._strangers, self._idle):
            for transport in [one for one in open_ones if one.is_closing()]:
                del open_ones[transport]


class Bytes:
    """The bytes of requests that are being read or answered: of each key, and of all. Who finds no room waits."""

    def __init__(self, of_a_key: int = MAX_BYTES_OF_A_KEY, of_all: int = MAX_BYTES) -> None:
        self._of_a_key, self._of_all = of_a_key, of_all
        self._taken: Counter[bytes] = Counter()
        self._waiting: deque[tuple[bytes, int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def taken(self, key: bytes, size: int) -> AsyncIterator[None]:
        """Take that many bytes, of which there are never more than one key may have."""
        assert size <= self._of_a_key <= self._of_all
        place = key, size, asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._let_in()
        try:
            await place[2]
            yield
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
            else:
                self._taken[key] -= size
            self._taken += Counter()  # forgets the keys that have none
            self._let_in()

    def _let_in(self) -> None:
        """Let those in for whom there is room, in their order: only a key that has its share is passed over."""
        for place in list(self._waiting):
            key, size, has_room = place
            if has_room.done() or self._taken[key] + size > self._of_a_key:  # done: it has hung up
                continue
            if self._taken.total() + size > self._of_all:
                return
            self._waiting.remove(place)
            self._taken[key] += size
            has_room.set_result(None)
