"""Values from one rank to another outside collectives: for ranks that do not go through the same steps."""

from __future__ import annotations

import contextlib
import pickle
from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.types import TrainingDiverged, UserError


class Link:
    """A channel between any two ranks of a mesh that holds all of them; through gloo, on the host.

    `send` does not wait for the receiver. Values from one rank to another arrive in the order they were sent. A
    UserError or TrainingDiverged that is sent is raised where it is received.
    """

    def __init__(self, world: DeviceMesh, channel: int, *, in_flight: int = 1) -> None:
        """Channels of different numbers do not wait for each other. Of those sent to one rank the last `in_flight`
        values may be on their way; a sender that is further ahead waits."""
        self._group = world.get_group()
        self._channel, self._in_flight = channel, in_flight
        self._sent: defaultdict[int, deque[_PendingSend]] = defaultdict(deque)

    def send(self, value: Any, *, to: int) -> None:
        """Send a picklable value to a rank, which must receive it some time."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sent = self._sent[to]
        sent.append(_PendingSend([torch.tensor([content.numel()]), content], to, self._group, self._channel))
        while len(sent) > self._in_flight:
            sent.popleft().wait()

    def receive(self, *, source: int) -> Any:
        """The next value from a rank; waits for it."""
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group, tag=self._channel)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(content, source, group=self._group, tag=self._channel)
        value = pickle.loads(content.numpy().tobytes())
        if isinstance(value, UserError | TrainingDiverged):
            raise value
        return value

    def settle(self) -> None:
        """Wait until everything that was sent has been received."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().wait()

    def settle_if_possible(self) -> None:
        """The same, for a sender that ends: a receiver that has ended first is no reason to complain."""
        for sent in self._sent.values():
            while sent:
                with contextlib.suppress(RuntimeError):
                    sent.popleft().wait()


class _PendingSend:
    """One value on its way, with the memory that it is sent from."""

    def __init__(self, parts: list[Tensor], to: int, group: dist.ProcessGroup, channel: int) -> None:
        self._parts = parts
        self._works = [dist.isend(part, to, group=group, tag=channel) for part in parts]

    def wait(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()
