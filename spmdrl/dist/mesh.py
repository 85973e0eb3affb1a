"""Which ranks do what together. Built once, in `main`, and passed to whoever communicates."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.dist.session import World


@dataclass(frozen=True, slots=True)
class Meshes:
    """The groups of ranks of a run; each is one axis long."""

    data: DeviceMesh  # ranks that hold different rollouts
    shard: DeviceMesh  # ranks over which parameters are split
    engine: DeviceMesh  # ranks that share one engine; the first of them leads it


def build_meshes(world: World, *, ranks_per_engine: int = 1) -> Meshes:
    """Every rank holds its own rollouts and its own shard of every parameter; neighbours share an engine."""
    everyone = init_device_mesh(world.device.type, (world.num_ranks,), mesh_dim_names=("data",))
    num_engines = world.num_ranks // ranks_per_engine
    engines = init_device_mesh(
        world.device.type, (num_engines, ranks_per_engine), mesh_dim_names=("engines", "engine")
    )
    return Meshes(data=everyone, shard=everyone, engine=engines["engine"])
