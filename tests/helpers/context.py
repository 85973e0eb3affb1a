"""Sequences that are cut across ranks, and the mesh they are cut over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.context import Style

STYLES: list[Style] = ["all_gather", "ulysses"]


@contextmanager
def world_mesh() -> Iterator[DeviceMesh]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        yield build_meshes(world).world


def offsets_of(seqlens: list[int]) -> Tensor:
    return torch.tensor([0, *seqlens]).cumsum(0).int()


def with_gradients(out: Tensor, grad: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def local_part(x: Tensor, dim: int, mesh: DeviceMesh) -> Tensor:
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()]
