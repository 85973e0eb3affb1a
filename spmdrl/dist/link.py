"""Point-to-point messages between ranks that do not run the same steps, so that collectives do not fit."""

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
    """A channel between any two ranks of the world; through gloo, on the host.

    `send` does not wait for the receiver. Values from one rank to another arrive in the order they were sent. A
    UserError or TrainingDiverged that is sent is raised on the receiving rank.
    """

    def __init__(self, world: DeviceMesh, channel: int, *, in_flight: int = 1) -> None:
        """Channels with different numbers are independent. `send` waits only when more than `in_flight` values to the
        same rank have not been received."""
        self._group = world.get_group()
        self._channel, self._in_flight = channel, in_flight
        self._sent: defaultdict[int, deque[_PendingSend]] = defaultdict(deque)

    def send(self, value: Any, *, to: int) -> None:
        """Send a picklable value to a rank, which must receive it at some point."""
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sent = self._sent[to]
        sent.append(_PendingSend([torch.tensor([content.numel()]), content], to, self._group, self._channel))
        while len(sent) > self._in_flight:
            sent.popleft().wait()

    def receive(self, *, source: int) -> Any:
        """Wait for the next value from a rank and return it."""
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
        """Like `settle`, at the end of the sender: ignores receivers that have ended already."""
        for sent in self._sent.values():
            while sent:
                with contextlib.suppress(RuntimeError):
                    sent.popleft().wait()


class _PendingSend:
    """One value being sent; keeps its memory alive until then."""

    def __init__(self, parts: list[Tensor], to: int, group: dist.ProcessGroup, channel: int) -> None:
        self._parts = parts
        self._works = [dist.isend(part, to, group=group, tag=channel) for part in parts]

    def wait(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()
