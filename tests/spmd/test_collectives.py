"""Objects of any size arrive on every rank, in the order of the mesh."""

from __future__ import annotations

from typing import Any

from spmdrl.config import ParallelConfig
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from tests.helpers.ranks import run_ranks

SIZES = (0, 1, 4000, 4096, 5000, 100_000)


def gathered(sizes: tuple[int, ...]) -> list[list[Any]]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        mesh = build_meshes(world, ParallelConfig()).training
        found = [gather_objects(mesh, {"rank": world.rank, "text": "x" * size * world.rank}) for size in sizes]
        return [*found, gather_objects(mesh, None), gather_objects(mesh, (1, b"\0\0"))]


def test_objects_of_any_size_are_gathered() -> None:
    for num_ranks in (1, 3):
        ranks = range(num_ranks)
        expected = [[{"rank": rank, "text": "x" * size * rank} for rank in ranks] for size in SIZES]
        expected += [[None for _ in ranks], [(1, b"\0\0") for _ in ranks]]
        assert run_ranks(num_ranks, gathered, SIZES) == [expected] * num_ranks
