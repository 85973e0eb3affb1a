"""Which ranks do what together. Built once, in `main`, and passed to whoever communicates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.dist.session import World


@dataclass(frozen=True, slots=True)
class Meshes:
    """The groups of ranks of a run; each is one axis long. A rank may use only those it belongs to.

    Colocated, every rank trains and holds an engine, and `world`, `data`, `shard` and `engines` are one mesh.
    """

    world: DeviceMesh  # all ranks
    data: DeviceMesh  # ranks that train, on different sequences
    shard: DeviceMesh  # ranks over which parameters are split
    engines: DeviceMesh  # ranks that hold engines
    engine: DeviceMesh  # those of them that share one; the first of them leads it
    weights: DeviceMesh | None  # disaggregated: the first rank that trains, then those that hold engines

    @property
    def trains(self) -> bool:
        """Whether this rank holds a part of the policy."""
        return self.data.get_coordinate() is not None

    @property
    def samples(self) -> bool:
        """Whether this rank holds an engine, or a part of one."""
        return self.engines.get_coordinate() is not None

    @property
    def engine_index(self) -> int:
        """This rank's engine among all engines."""
        return self.engines.get_local_rank() // self.engine.size()

    @property
    def num_engines(self) -> int:
        """Engines of the run."""
        return self.engines.size() // self.engine.size()


def build_meshes(world: World, *, ranks_per_engine: int = 1, engine_ranks: int = 0) -> Meshes:
    """Neighbours share an engine. With `engine_ranks` the last so many ranks only hold engines and the others only
    train; with 0 every rank does both. Every rank takes part in making every group, also of those it is not in."""
    kind = world.device.type
    everyone = init_device_mesh(kind, (world.num_ranks,), mesh_dim_names=("data",))
    if not engine_ranks:
        grid = init_device_mesh(kind, (world.num_ranks // ranks_per_engine, ranks_per_engine), mesh_dim_names=_GRID)
        return Meshes(everyone, everyone, everyone, everyone, grid["engine"], None)
    ranks = torch.arange(world.num_ranks)
    training, sampling = ranks[:-engine_ranks], ranks[-engine_ranks:]
    data = DeviceMesh(kind, training, mesh_dim_names=("data",))
    engines = DeviceMesh(kind, sampling, mesh_dim_names=("engines",))
    grid = DeviceMesh(kind, sampling.view(-1, ranks_per_engine), mesh_dim_names=_GRID)
    weights = DeviceMesh(kind, torch.cat([training[:1], sampling]), mesh_dim_names=("weights",))
    # An axis cannot be asked for on a rank that is not in the grid.
    engine = grid["engine"] if world.rank in sampling else grid
    return Meshes(everyone, data, data, engines, engine, weights)


_GRID = ("engines", "engine")
