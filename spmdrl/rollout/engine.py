"""What the trainer asks of an engine. One door per engine: an implementation is the only importer of its library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

from torch import Tensor

from spmdrl.refit.bucket import Bucket
from spmdrl.types import Request, Response


class EngineDied(RuntimeError):
    """A process of the engine has ended, or said that it cannot go on."""


class WeightSink(Protocol):
    """The receiving side of a refit. Every rank that holds a part of the engine makes the same calls, in order:

    `begin_update`, then for each bucket `wait` and `load`, `end_update`, and now and then `differing`.
    """

    version: int  # optimizer steps behind the weights now loaded; -1 before the first refit
    naming: Literal["model", "checkpoint"]  # whose tensor names it loads

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory [num_bytes] uint8 that buckets can be handed over in."""
        ...

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        """Open a refit to `version`: the loaded weights count for nothing until `end_update`.

        Bucket i will lie in buffers[i % len(buffers)]; all of them come from `allocate`.
        """
        ...

    def load(self, number: int) -> None:
        """Start to copy bucket `number`, which is in its buffer now; the buffer must stay as it is until `wait`."""
        ...

    def wait(self) -> None:
        """Return when the bucket last given to `load` has been copied, if there was one."""
        ...

    def end_update(self) -> None:
        """Close the refit. Raises when a parameter was not loaded; drops every cache of the old weights."""
        ...

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        """Digests, under the engine's own names, of what this rank's part must hold once the bucket is loaded."""
        ...

    def differing(self, expected: dict[str, str]) -> list[str]:
        """Names of the engine's weights whose digests are not the expected ones, with those it holds and nobody
        expected; empty on ranks that do not lead the engine."""
        ...


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

    def revive(self) -> None:
        """Start the engine anew if it has died. Every rank that holds a part of it must call this.

        A new engine is awake and without weights.
        """
        ...

    def close(self) -> None:
        """End the engine and free what it holds."""
        ...
