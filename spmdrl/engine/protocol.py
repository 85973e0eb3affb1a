"""What the trainer asks of an engine. One door per engine: an implementation is the only importer of its library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from spmdrl.refit.sink import WeightSink
from spmdrl.types import Request, Response


class EngineDied(RuntimeError):
    """A process of the engine has ended, or said that it cannot go on."""


class RolloutEngine(WeightSink, Protocol):
    """Samples responses with weights of its own, which refits replace.

    After construction the weights are undefined until a whole update has been loaded; `generate` refuses to run on
    them. Where ranks share an engine one of them leads it; for the others `generate` yields nothing.
    """

    leads: bool  # whether this rank talks to the engine

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """Yield (place among the requests, counted from 0, response) as each finishes.

        Requests are taken only when there is room to run them. None, which has no place, says that there is nothing
        to start now: more is asked for after the next response at the latest, and now and then before it.
        """
        ...

    def abort(self) -> None:
        """Take no more requests and end what is running: every unfinished request that was taken yields what it has
        with finish reason `abort`. Any thread may call this, more than once; without a `generate` it does nothing."""
        ...

    def sleep(self) -> None:
        """Give back the memory that training needs: of what the engine was told to release, all that it holds now.

        Released weights count as not loaded; the next `begin_update` takes their memory back.
        """
        ...

    def wake(self) -> None:
        """Take back the memory that sampling needs, but for weights. Does nothing when it was not given back."""
        ...

    def require_alive(self) -> None:
        """Raise EngineDied when the engine has died. The methods of `WeightSink` do not: their ranks go on together to
        the end of an update, and whoever updates asks here after it."""
        ...

    def revive(self) -> None:
        """Start the engine anew if it has died. Every rank that holds a part of it must call this.

        A new engine is awake and without weights.
        """
        ...

    def close(self) -> None:
        """End the engine and free what it holds."""
        ...
