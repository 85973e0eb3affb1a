"""The receiving side of a refit, whatever engine is behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from spmdrl.refit.bucket import Bucket

Naming = Literal["model", "checkpoint"]  # whose tensor names: the model's own, or those of its files


class WeightSink(Protocol):
    """The receiving side of a refit. Every rank that holds a part of the engine makes the same calls, in order:

    `begin_update`, then for each bucket `wait` and `load`, `end_update`, and now and then `differing`.
    """

    version: int  # optimizer steps behind the weights now loaded; -1 before the first refit
    naming: Naming  # whose tensor names it loads

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
