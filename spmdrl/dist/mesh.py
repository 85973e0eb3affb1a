"""Which ranks do what together. Built once, in `main`, and passed to whoever communicates."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.config import ParallelConfig
from spmdrl.dist.session import World


@dataclass(frozen=True, slots=True)
class ModelMeshes:
    """How the policy lies on the ranks that train.

    A rank's place in `dense` says which part it has of the weights that all tokens use. The same ranks in another
    order form `expert`, where a layer's experts are dealt to ranks; it is None when every rank computes all experts.
    """

    dense: DeviceMesh  # [replicate, shard, tp]
    expert: DeviceMesh | None  # [replicate, expert_shard, ep]
    copy: DeviceMesh  # the ranks that hold one copy of the weights between them
    cp: DeviceMesh  # neighbours that each compute a chunk of the same tokens
    cp_style: Literal["all_gather", "ulysses"]

    @property
    def tp(self) -> DeviceMesh:
        """Neighbours that compute the same tokens with a part of each layer."""
        return self.dense["tp"]


@dataclass(frozen=True, slots=True)
class Meshes:
    """The groups of ranks of a run; all but those in `model` are one axis long. A rank may use only those it belongs
    to.

    Colocated, every rank trains and holds an engine: `world`, `training` and `engines` are one mesh.
    """

    world: DeviceMesh  # all ranks
    training: DeviceMesh  # ranks that hold a part of the policy
    data: DeviceMesh  # those of them with this rank's place in a group that shares its sequences
    model: ModelMeshes
    engines: DeviceMesh  # ranks that hold engines
    engine: DeviceMesh  # those of them that share one; the first of them leads it
    weights: DeviceMesh | None  # disaggregated: the first rank that trains, then those that hold engines

    @property
    def trains(self) -> bool:
        """Whether this rank holds a part of the policy."""
        return self.training.get_coordinate() is not None

    @property
    def samples(self) -> bool:
        """Whether this rank holds an engine, or a part of one."""
        return self.engines.get_coordinate() is not None

    @property
    def speaks_for_data(self) -> bool:
        """Whether this rank reports what all ranks with the same sequences know."""
        return self.training.get_local_rank() % self.ranks_per_share == 0

    @property
    def ranks_per_share(self) -> int:
        """Neighbours that work on the same sequences."""
        return self.training.size() // self.data.size()

    @property
    def engine_index(self) -> int:
        """This rank's engine among all engines."""
        return self.engines.get_local_rank() // self.engine.size()

    @property
    def num_engines(self) -> int:
        """Engines of the run."""
        return self.engines.size() // self.engine.size()


def build_meshes(
    world: World, parallel: ParallelConfig | None = None, *, ranks_per_engine: int = 1, engine_ranks: int = 0
) -> Meshes:
    """Neighbours share an engine. With `engine_ranks` the last so many ranks only hold engines and the others only
    train; with 0 every rank does both. Every rank takes part in making every group, also of those it is not in.

    The ranks that train are laid out as [dp_replicate, dp_shard, cp, tp], the last fastest: those that exchange the
    most are neighbours. `plan.parallel_problems` says whether that works out.
    """
    kind = world.device.type
    everyone = init_device_mesh(kind, (world.num_ranks,), mesh_dim_names=("world",))
    ranks = torch.arange(world.num_ranks)
    training, sampling = ranks[: world.num_ranks - engine_ranks], ranks[world.num_ranks - engine_ranks :]
    train = DeviceMesh(kind, training, mesh_dim_names=("training",)) if engine_ranks else everyone
    data, model = _training_meshes(kind, training, world.rank, parallel or ParallelConfig())
    if not engine_ranks:
        grid = init_device_mesh(kind, (world.num_ranks // ranks_per_engine, ranks_per_engine), mesh_dim_names=_GRID)
        return Meshes(everyone, train, data, model, everyone, grid["engine"], None)
    engines = DeviceMesh(kind, sampling, mesh_dim_names=("engines",))
    grid = DeviceMesh(kind, sampling.view(-1, ranks_per_engine), mesh_dim_names=_GRID)
    weights = DeviceMesh(kind, torch.cat([training[:1], sampling]), mesh_dim_names=("weights",))
    # An axis cannot be asked for on a rank that is not in the grid.
    engine = grid["engine"] if world.rank in sampling else grid
    return Meshes(everyone, train, data, model, engines, engine, weights)


def second_group(mesh: DeviceMesh, *, patience_minutes: int) -> DeviceMesh:
    """The ranks of a mesh of one axis once more, through gloo, for a thread beside the step: collectives of two threads
    must not meet in one group. Every rank of the mesh takes part."""
    group = dist.new_group(
        dist.get_process_group_ranks(mesh.get_group()),
        backend="gloo",
        timeout=timedelta(minutes=patience_minutes),
        use_local_synchronization=True,
    )
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("beside",))


_GRID = ("engines", "engine")


def _training_meshes(kind: str, ranks: Tensor, me: int, parallel: ParallelConfig) -> tuple[DeviceMesh, ModelMeshes]:
    """The data mesh, and how the policy lies on these ranks."""
    replicate, cp, tp, ep = parallel.dp_replicate, parallel.cp, parallel.tp, parallel.ep
    dense = DeviceMesh(kind, ranks.view(replicate, -1, tp), mesh_dim_names=("replicate", "shard", "tp"))
    expert = None
    if ep > 1:
        expert = DeviceMesh(kind, ranks.view(replicate, -1, ep), mesh_dim_names=("replicate", "expert_shard", "ep"))
    return (
        _axis_of(kind, "data", ranks.view(-1, cp * tp).t(), me),
        ModelMeshes(
            dense,
            expert,
            copy=_axis_of(kind, "copy", ranks.view(replicate, -1), me),
            cp=_axis_of(kind, "cp", ranks.view(-1, cp, tp).transpose(1, 2).flatten(0, 1), me),
            cp_style=parallel.cp_style,
        ),
    )


def _axis_of(kind: str, name: str, groups: Tensor, me: int) -> DeviceMesh:
    """Of groups [n, ranks in each], the one that this rank is in; of a rank that is in none, any."""
    grid = DeviceMesh(kind, groups, mesh_dim_names=(f"{name}_groups", name))
    return grid[name] if me in groups else grid
