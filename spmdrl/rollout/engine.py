"""What the trainer asks of an engine. One door per engine: an implementation is the only importer of its library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from spmdrl.types import Request, Response


class RolloutEngine(Protocol):
    """Samples responses with weights of its own, which refits replace.

    After construction and after `wake` the weights are undefined until a whole update has been loaded;
    `generate` refuses to run on them.
    """

    version: int  # optimizer steps behind the weights now loaded; -1 before the first refit

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Response]]:
        """Yield (index into requests, response) as each finishes; a caller may `abort` between two of them."""
        ...

    def abort(self) -> None:
        """End what is running: every unfinished request yields what it has with finish reason `abort`."""
        ...

    def sleep(self) -> None:
        """Give back the memory that only sampling needs."""
        ...

    def wake(self) -> None:
        """Take that memory again."""
        ...

    def begin_update(self) -> None:
        """Open a refit: the loaded weights count for nothing until `end_update`."""
        ...

    def load_bucket(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy whole parameters into place; the tensors may be reused when this returns."""
        ...

    def end_update(self, version: int) -> None:
        """Close the refit. Raises when a parameter was not loaded; drops every cache of the old weights."""
        ...

    def close(self) -> None:
        """End the engine and free what it holds."""
        ...


@contextmanager
def awake(engine: RolloutEngine) -> Iterator[RolloutEngine]:
    """The engine holds the memory it samples with inside the block, and gives it back after."""
    engine.wake()
    try:
        yield engine
    finally:
        engine.sleep()
