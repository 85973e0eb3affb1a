"""The engine as the rest of a run sees it. An implementation is the only importer of its library."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from spmdrl.config.engines import EngineFacts
from spmdrl.refit.bucket import AdapterVersion, Bucket, Naming, WeightSink
from spmdrl.types import Request, Response

if TYPE_CHECKING:
    from spmdrl.config import Config
    from spmdrl.run import Launch


class EngineDied(RuntimeError):
    """A process of the engine has ended, or reported that it cannot continue."""


class Clock(Protocol):
    """Counts what an engine samples, and says when it pauses."""

    @abstractmethod
    def advance(self) -> bool:
        """Count one more token of every running request; True: end `generate` now, as `abort` does."""


class RolloutEngine(WeightSink):
    """Samples responses with weights of its own, which refits replace.

    Until the first refit the weights are undefined. Where ranks share an engine one of them leads it; for the others
    `generate` yields nothing. A subclass needs `generate` and `load`; everything else has a default that suits an
    engine inside the rank's process.
    """

    facts: ClassVar[EngineFacts] = EngineFacts()
    naming: Naming = "model"
    leads = True  # whether this rank talks to the engine
    clock: Clock | None = None  # which `generate` advances, where `facts` say so

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = self._next_version = -1
        self._buckets: Sequence[Bucket] = ()
        self._buffers: Sequence[Tensor] = ()

    @classmethod
    def problems(
        cls,
        cfg: Config,
        model_config: Any,
        stop_token_ids: frozenset[int] | None,
        *,
        num_ranks: int,
        device_type: str,
    ) -> Iterator[str]:
        """Yield a sentence for each reason why the engine could not start or would not do what the settings say.

        `stop_token_ids` end a response; None when they could not be found.
        """
        yield from ()

    @classmethod
    def start(cls, run: Launch[Config]) -> RolloutEngine:
        """Start this rank's engine, or join the ranks that share one. Raises UserError when it cannot be refitted."""
        return cls(run.device)

    @classmethod
    def start_receiver(cls, run: Launch[Config]) -> RolloutEngine:
        """Start the engine of a rank that does not train: its `load` receives each bucket first."""
        raise NotImplementedError(f"{cls.__name__} cannot run disaggregated")

    @classmethod
    def start_sender(cls, run: Launch[Config]) -> RolloutEngine:
        """Start the proxy of the engines of other ranks on a rank that trains: its `load` sends each bucket."""
        raise NotImplementedError(f"{cls.__name__} cannot run disaggregated")

    @abstractmethod
    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """Yield (place among the requests, counted from 0, response) as each finishes.

        Take a request only when there is room to run it. None has no place and means that there is nothing to start
        now: ask for more after the next response at the latest, and now and then before it.
        """

    def abort(self) -> None:
        """Take no more requests and end what is running: every unfinished request that was taken yields what it has
        with finish reason `abort`. Any thread may call this, more than once; without a `generate` it does nothing."""

    def ask_soon(self) -> None:
        """Ask `generate`'s caller for requests soon: there may be one again. Any thread may call this."""

    def sleep(self) -> None:
        """Give back the memory that training needs: that of `offload.engine` which it has now.

        Released weights count as not loaded; the next `begin_update` takes their memory back.
        """

    def wake(self) -> None:
        """Take back the memory that sampling needs, except for weights. Does nothing when it was not given back."""

    def require_alive(self) -> None:
        """Raise EngineDied when the engine has died. The methods of a refit do not: all ranks finish the update
        together, and the caller checks afterwards."""

    def revive(self) -> None:
        """Start the engine again if it has died; every rank that holds a part of it must call this.

        A new engine is awake and has no weights.
        """

    def close(self) -> None:
        """End the engine and free what it holds."""

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @property
    def has_weights(self) -> bool:
        return self.version >= 0

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        self._buckets, self._buffers, self._next_version = buckets, buffers, version

    @abstractmethod
    def load(self, number: int) -> None: ...

    def wait(self) -> None:
        return

    def end_update(self) -> None:
        self.version = self._next_version

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        return {}

    def differing(self, expected: dict[str, str]) -> list[str]:
        return []

    def load_adapters(self, adapters: AdapterVersion) -> list[str]:
        raise NotImplementedError(f"{type(self).__name__} takes no adapters")

    def tensors(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of each weight in bucket `number`, with a view of it in the bucket's buffer."""
        buffer = self._buffers[number % len(self._buffers)]
        for entry in self._buckets[number].flat_entries:
            yield entry.name, entry.view(buffer)


# What engines share.


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


class AdapterRefs:
    """Counts the running requests of each version; one that is not the newest and that none needs is unused."""

    def __init__(self) -> None:
        self._loaded: set[int] = set()
        self._running: Counter[int] = Counter()

    def add(self, version: int) -> None:
        """Note that the engine has loaded the adapters of this version."""
        self._loaded.add(version)

    def __contains__(self, version: int) -> bool:
        return version in self._loaded

    def begin(self, version: int) -> None:
        """Note that a request of this version was taken."""
        self._running[version] += 1

    def end(self, version: int) -> None:
        """Note that a request of this version has ended, in whatever way."""
        self._running[version] -= 1

    def none_running(self) -> None:
        """Note that nothing runs any more: what still ran was given up."""
        self._running.clear()

    def pop_unused(self, newest: int) -> list[int]:
        """Return the versions that no request needs, oldest first, and forget them."""
        unused = sorted(version for version in self._loaded if version != newest and not self._running[version])
        self._loaded.difference_update(unused)
        return unused

    def clear(self) -> None:
        """Forget everything: the engine was started again."""
        self._loaded.clear()
        self._running.clear()
