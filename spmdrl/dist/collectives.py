"""Named reductions and gathers. Every rank of the mesh must call each of them, in the same order."""

from __future__ import annotations

import contextlib
import pickle
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.metrics import Metrics, merge_all
from spmdrl.types import TrainingDiverged, UserError

T = TypeVar("T")

_INLINE_BYTES = 4096
_SIZE_BYTES = 8


def sum_over(mesh: DeviceMesh, value: Tensor) -> Tensor:
    """Return the sum of `value` over the ranks of the mesh, on every rank; `value` itself does not change."""
    total = value.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=mesh.get_group())
    return total


def largest_over(mesh: DeviceMesh, values: Tensor) -> None:
    """Overwrite each of these values with the largest that a rank of the mesh has."""
    if mesh.size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mesh.get_group())


def any_rank(mesh: DeviceMesh, flag: bool) -> bool:
    """Return True on every rank if `flag` is True on any; on the host, like `host_barrier`."""
    if mesh.size() == 1:
        return flag
    vote = torch.tensor(int(flag))
    dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return bool(vote)


def gather_objects(mesh: DeviceMesh, value: T) -> list[T]:
    """Return every rank's small picklable value, in mesh order, on every rank.

    A step asks for this some 17 times, so a rank that is alone pickles nothing, and a value of up to _INLINE_BYTES is
    gathered together with its size, in one collective. torch's `all_gather_object` needs two.
    """
    if mesh.size() == 1:
        return [value]
    content = pickle.dumps(value)
    first = content[:_INLINE_BYTES]
    starts = _gather_bytes(mesh, len(content).to_bytes(_SIZE_BYTES, "little") + first, _SIZE_BYTES + _INLINE_BYTES)
    sizes = [int.from_bytes(start[:_SIZE_BYTES], "little") for start in starts]
    contents = [start[_SIZE_BYTES:] for start in starts]
    if (left := max(sizes) - _INLINE_BYTES) > 0:
        rests = _gather_bytes(mesh, content[_INLINE_BYTES:], left)
        contents = [start + rest for start, rest in zip(contents, rests, strict=True)]
    return [pickle.loads(content[:size]) for content, size in zip(contents, sizes, strict=True)]


def _gather_bytes(mesh: DeviceMesh, mine: bytes, size: int) -> list[bytes]:
    """Return every rank's bytes, filled up to `size`, in mesh order."""
    padded = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
    everyone = torch.empty(mesh.size(), size, dtype=torch.uint8)
    gather_flat(mesh, everyone.view(-1), padded)
    return [row.numpy().tobytes() for row in everyone]


@contextmanager
def raise_on_all_ranks(mesh: DeviceMesh) -> Iterator[None]:
    """Raise a UserError or TrainingDiverged of one rank's local work on every rank; the first rank's error wins.

    Otherwise the other ranks would wait in the next collective, and report a lost connection in place of the cause.
    Put no collective inside the block.
    """
    problem: UserError | TrainingDiverged | None = None
    try:
        yield
    except (UserError, TrainingDiverged) as error:
        problem = error
    for theirs in gather_objects(mesh, problem):
        if theirs is not None:
            raise theirs


def require_same(mesh: DeviceMesh, value: object, what: str) -> None:
    """Raise UserError on every rank when the values differ: usually because a folder is not shared."""
    seen = gather_objects(mesh, value)
    if any(other != seen[0] for other in seen):
        found = ", ".join(dict.fromkeys(str(other) for other in seen))
        raise UserError(f"{what} is not the same on all ranks ({found}); put it on storage that all nodes share")


def gather_flat(mesh: DeviceMesh, output: Tensor, mine: Tensor) -> None:
    """Gather every rank's `mine` [n] into `output` [ranks x n], in mesh order."""
    # torch 2.13 renamed this function and warns about the old name.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(output, mine, group=mesh.get_group())


def exchange_rows(mesh: DeviceMesh, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send `sent[r]` rows to each rank r, in order; return those received, `received[r]` from rank r."""
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=mesh.get_group())
    return output


def scatter_sums(mesh: DeviceMesh, output: Tensor, mine: Tensor) -> None:
    """Sum every rank's `mine` [ranks x n], and give each rank its nth of the sum, in mesh order: `output` [n]."""
    # torch 2.13 renamed this function and warns about the old name.
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    scatter(output, mine, group=mesh.get_group())


def copy_from(mesh: DeviceMesh, value: Tensor, *, rank: int) -> None:
    """Overwrite `value` with that of one rank, in the order of the mesh."""
    dist.broadcast(value, group=mesh.get_group(), group_src=rank)


def gather_rows(mesh: DeviceMesh, mine: Tensor) -> list[Tensor]:
    """Return every rank's rows [n, k] on the host, in mesh order; n may differ between ranks."""
    if mesh.size() == 1:
        return [mine]
    counts = torch.empty(mesh.size(), dtype=torch.int64)
    gather_flat(mesh, counts, torch.tensor([mine.shape[0]]))
    padded = mine.new_zeros(int(counts.max()), mine.shape[1])
    padded[: mine.shape[0]] = mine
    rows = mine.new_empty(mesh.size(), *padded.shape)
    gather_flat(mesh, rows.view(-1), padded.view(-1))
    return [part[:count] for part, count in zip(rows, counts.tolist(), strict=True)]


def barrier(mesh: DeviceMesh) -> None:
    """Wait until every rank of the mesh is here."""
    dist.barrier(group=mesh.get_group())


def host_barrier(mesh: DeviceMesh) -> None:
    """Wait on the host until every rank of the mesh is here. This uses gloo, which sleeps while it waits and queues
    nothing on the device."""
    dist.all_reduce(torch.zeros(1), group=mesh.get_group())


def merge_over(mesh: DeviceMesh, metrics: Metrics) -> Metrics:
    """Merge the metrics of all ranks; returns the result on every rank."""
    return merge_all(gather_objects(mesh, metrics))


# Point-to-point messages between ranks that do not run the same steps, so that collectives do not fit.


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
