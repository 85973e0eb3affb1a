"""An engine that is nothing but a process: it opens buckets as SGLang's do, by the same loader, and keeps copies."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.engine.sglang.loader import describe_bucket, load_bucket
from spmdrl.engine.sglang.process import Handle
from spmdrl.refit.bucket import Bucket, Naming, bucket_of
from spmdrl.refit.digest import digest

LIMIT_S = 120.0


class OtherProcess:
    """A `WeightSink`. Holds its weights on `device`; buckets lie there too, or in host memory."""

    naming: Naming = "model"

    def __init__(self, device: torch.device, *, transport: str) -> None:
        self.version = -1
        self._device = device
        self.device = device if transport == "cuda_ipc" else torch.device("cpu")
        if self.device.type == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")
        self._buffers: Sequence[Tensor] = ()
        self._parcels: list[tuple[str, Handle]] = []
        self._next_version = -1
        self._is_loading = False
        # A fork has imported everything, and has the other end of the pipe, too.
        is_fork = device.type == "cpu"
        context = multiprocessing.get_context("fork" if is_fork else "spawn")
        self._connection, theirs = context.Pipe()
        ends = (theirs, self._connection if is_fork else None)
        self._process = context.Process(target=_serve, args=(*ends, str(device)), daemon=True)
        self._process.start()
        theirs.close()

    def allocate(self, num_bytes: int) -> Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return memory if memory.is_cuda else memory.share_memory_()

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        if buffers is not self._buffers:
            self._buffers = buffers
            self._parcels = [
                self._parcel(bucket, buffers[number % len(buffers)], number % len(buffers))
                for number, bucket in enumerate(buckets)
            ]
        self._next_version = version

    def _parcel(self, bucket: Bucket, memory: Tensor, buffer: int) -> tuple[str, Handle]:
        stays_open = memory.device.type == self._device.type
        return describe_bucket(bucket, buffer=buffer, stays_open=stays_open), Handle(memory[: bucket.num_bytes])

    def load(self, number: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self._send("load", *self._parcels[number])
        self._is_loading = True

    def wait(self) -> None:
        if self._is_loading:
            self._receive()
        self._is_loading = False

    def load_one(self, name: str, tensor: Tensor) -> None:
        """Send one tensor, and return when it was copied."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        description = describe_bucket(bucket_of([(name, tensor)]), buffer=0, stays_open=False)
        self._send("load", description, Handle(tensor.view(-1).view(torch.uint8)))
        self._receive()

    def end_update(self) -> None:
        self.version = self._next_version

    def digests_of(self, bucket: Bucket, flat: Tensor) -> dict[str, str]:
        return {entry.name: digest(entry.view(flat)) for entry in bucket.flat_entries}

    def differing(self, expected: dict[str, str]) -> list[str]:
        self._send("digests")
        held = self._receive()
        return sorted(name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name))

    def weights(self) -> dict[str, Tensor]:
        """Host copies of what it holds."""
        self._send("copies")
        return {name: torch.frombuffer(data, dtype=dtype).view(shape) for name, data, dtype, shape in self._receive()}

    def close(self) -> None:
        self._connection.close()
        self._process.join(LIMIT_S)

    def _send(self, verb: str, *arguments: Any) -> None:
        self._connection.send_bytes(ForkingPickler.dumps((verb, arguments)))

    def _receive(self) -> Any:
        assert self._connection.poll(LIMIT_S), "the other process says nothing"
        return self._connection.recv()


class _Weights(nn.Module):
    """The process's weights: buffers by the names in the buckets; `load_weights` is what SGLang's models have."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def load_weights(self, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            self._buffers[name].copy_(tensor)

    def load(self, description: str, flat: Tensor) -> None:
        for name, shape, dtype, _ in json.loads(description)["entries"]:
            if name not in self._buffers:
                self._buffers[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
        load_bucket(self, [(description, flat.to(self.device))])

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self._buffers.items()}

    def copies(self) -> list[Any]:
        return [
            (name, bytearray(x.cpu().view(-1).view(torch.uint8).numpy()), x.dtype, x.shape)
            for name, x in self._buffers.items()
        ]


def _serve(connection: Connection, others: Connection | None, device: str) -> None:
    if others is not None:
        others.close()
    torch.set_num_threads(1)
    weights = _Weights(torch.device(device))
    if weights.device.type == "cuda":
        torch.cuda.set_device(weights.device)  # kernels are launched, and waited for, on the process's own
    while True:
        try:
            verb, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer = getattr(weights, verb)(*arguments)
        del arguments
        connection.send(answer)
