"""Whole parameters from their shards: one all-gather per bucket, through one persistent pair of flat buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmdrl.dist.collectives import gather_flat
from spmdrl.model.policy import Policy
from spmdrl.rollout.torch_engine import persistent_buffers


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where one parameter's shard lies in the flat buffer of its bucket."""

    name: str
    shape: torch.Size
    offset: int  # elements
    numel: int  # elements of the largest rank's shard


class Gatherer:
    """Yields a sharded policy's weights as full tensors of `dtype`, in buckets of at most `bucket_bytes` (or one
    parameter). Every rank of the mesh must exhaust `buckets()`; the tensors are valid until the next bucket."""

    def __init__(self, policy: Policy, mesh: DeviceMesh, *, dtype: torch.dtype, bucket_bytes: int) -> None:
        self._policy = policy
        self._mesh = mesh
        self._dtype = dtype
        self._plan: list[list[_Slot]] = []
        room = 0
        for name, parameter in policy.model.named_parameters():  # tied weights appear once
            numel = self._padded_shard_numel(name, parameter)
            if not self._plan or (room + numel) * mesh.size() * dtype.itemsize > bucket_bytes:
                self._plan.append([])
                room = 0
            self._plan[-1].append(_Slot(name, parameter.shape, room, numel))
            room += numel
        self._largest = max(slots[-1].offset + slots[-1].numel for slots in self._plan)
        self._send: Tensor | None = None
        self._receive: Tensor | None = None

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Each bucket's (name, full tensor) pairs; the names are those of the model's own parameters and buffers."""
        parameters = dict(self._policy.model.named_parameters())
        device = torch.device(self._mesh.device_type)
        if self._send is None or self._receive is None:
            self._send = torch.zeros(self._largest, dtype=self._dtype, device=device)
            self._receive = torch.empty(self._mesh.size() * self._largest, dtype=self._dtype, device=device)
        for slots in self._plan:
            used = slots[-1].offset + slots[-1].numel
            send = self._send[:used]
            receive = self._receive[: self._mesh.size() * used]
            with torch.no_grad():
                for slot in slots:
                    # Cast before the gather: the engine's dtype is often half as wide.
                    local = parameters[slot.name].to_local()
                    send[slot.offset : slot.offset + local.numel()].copy_(local.flatten())
            gather_flat(self._mesh, receive, send)
            by_rank = receive.view(self._mesh.size(), used)
            yield [(slot.name, self._full(by_rank, slot)) for slot in slots]
        if buffers := persistent_buffers(self._policy.model):
            yield list(buffers.items())

    def _padded_shard_numel(self, name: str, parameter: Tensor) -> int:
        """Elements of the largest shard: FSDP gives the last ranks fewer rows, or none."""
        assert isinstance(parameter, DTensor) and parameter.placements[0].is_shard(0), f"{name} is not split by rows"
        return math.ceil(parameter.shape[0] / self._mesh.size()) * math.prod(parameter.shape[1:])

    @staticmethod
    def _full(by_rank: Tensor, slot: _Slot) -> Tensor:
        shards = by_rank[:, slot.offset : slot.offset + slot.numel]
        return shards.reshape(-1, *slot.shape[1:])[: slot.shape[0]]
