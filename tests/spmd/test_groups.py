"""All ranks create their groups in one order, as NCCL requires of them, and every group waits as long as the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from spmdrl.config import ParallelConfig
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from tests.helpers.ranks import run_ranks

LIMIT = timedelta(seconds=20)


@contextmanager
def bound_to_a_device() -> Iterator[list[Any]]:
    """Let torch create groups as it does when NCCL's communicator is bound to a device; yield the splits of it.

    Every rank must take part in each split of that communicator, also a rank that will not be in the new group. Here
    gloo carries what NCCL would. Members of a new group meet under the name that torch gives it, as in the gloo part of
    a real one.
    """
    splits: list[Any] = []
    default, new_group = distributed_c10d._get_default_group(), dist.new_group

    class Communicator:
        def perform_nocolor_split(self, _: torch.device) -> None:
            splits.append("one group")

    def recorded(ranks: list[int], *, backend: str | None = None, **options: Any) -> dist.ProcessGroup | None:
        if backend is None and dist.get_rank() in ranks:  # then it is NCCL's, and splits the communicator
            splits.append("one group")
        return new_group(ranks, backend=backend, **options)

    def split_group(*, split_ranks: list[list[int]], group_desc: str, **_: Any) -> dist.ProcessGroup | None:
        splits.append(split_ranks)
        mine = [ranks for ranks in split_ranks if dist.get_rank() in ranks]
        options: dict[str, Any] = {"use_local_synchronization": True, "group_desc": group_desc, "timeout": LIMIT}
        return new_group(mine[0], **options) if mine else None

    with (
        mock.patch.object(distributed_c10d, "_get_split_source", lambda _: Communicator()),
        mock.patch.object(dist, "new_group", recorded),
        mock.patch.object(device_mesh, "split_group", split_group),
        mock.patch.object(dist, "get_backend", lambda *_: "cpu:gloo,cuda:nccl"),
        mock.patch.object(device_mesh, "get_backend", lambda *_: "cpu:gloo,cuda:nccl"),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
    ):
        default.bound_device_id = torch.device("cuda", dist.get_rank())
        yield splits
        default.bound_device_id = None


def _splits(layouts: list[dict[str, Any]]) -> list[list[Any]]:
    found = []
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        for layout in layouts:
            with bound_to_a_device() as splits:
                meshes = build_meshes(world, **layout)
            found.append(splits)
            if meshes.weights is not None and meshes.weights.get_coordinate() is not None:
                assert world.rank in gather_objects(meshes.weights, world.rank)
            if meshes.trains:
                assert len(gather_objects(meshes.background, world.rank)) == meshes.training.size()
    return found


TOGETHER = [ParallelConfig(), ParallelConfig(cp=2), ParallelConfig(dp_replicate=2, tp=2), ParallelConfig(ep=2)]
APART = [{"engine_ranks": 1}, {"engine_ranks": 3}, {"engine_ranks": 2, "ranks_per_engine": 2}]


@pytest.mark.parametrize("layouts", [[{"parallel": parallel} for parallel in TOGETHER], *([x] for x in APART)], ids=str)
def test_every_rank_splits_the_communicator_in_one_order(layouts: list[dict[str, Any]]) -> None:
    first, *others = run_ranks(4, _splits, layouts)
    assert all(len(splits) >= 2 for splits in first)
    assert all(other == first for other in others)


def _timeouts(layout: dict[str, Any]) -> set[timedelta]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(replace(world, patience=LIMIT), **layout)
        policy = meshes.model.dense.get_all_groups() if meshes.trains else []
        of_roles = (meshes.training, meshes.background, meshes.data, meshes.engines, meshes.engine, meshes.weights)
        own = [mesh for mesh in of_roles if mesh is not None and mesh.get_coordinate() is not None]
        groups = [*policy, *(group for mesh in own for group in mesh.get_all_groups())]
        return {group._get_backend(torch.device("cpu")).options._timeout for group in groups}


@pytest.mark.parametrize("layout", [{"parallel": ParallelConfig(cp=2)}, {"engine_ranks": 2, "ranks_per_engine": 2}])
def test_every_group_waits_as_long_as_the_run_does(layout: dict[str, Any]) -> None:
    assert run_ranks(4, _timeouts, layout) == [{LIMIT}] * 4
