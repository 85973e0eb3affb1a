"""The meshes: which ranks work together on what. Built once and passed to every function that communicates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.dist.session import World

if TYPE_CHECKING:
    from spmdrl.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class ModelMeshes:
    """The meshes over which the policy is split, or another model.

    A rank's coordinates in `dense` select its part of the weights that all tokens use. `expert` holds the same ranks in
    another order and splits each layer's experts; it is None when every rank computes all experts.
    """

    dense: DeviceMesh  # [replicate, shard, tp]
    expert: DeviceMesh | None  # [replicate, expert_shard, ep]
    copy: DeviceMesh  # the ranks that together hold one copy of the weights
    cp: DeviceMesh  # neighbouring ranks that each compute a chunk of the same tokens
    cp_style: Literal["all_gather", "ulysses"]

    @property
    def tp(self) -> DeviceMesh:
        """Neighbouring ranks that compute the same tokens, each with a part of every layer."""
        return self.dense["tp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The meshes of a run; all but those in `model` have one axis. A rank may use only the meshes it belongs to.

    When colocated, every rank trains and holds an engine: `world`, `training` and `engines` are one mesh.
    """

    world: DeviceMesh  # all ranks
    training: DeviceMesh  # ranks that hold a part of the policy
    background: DeviceMesh  # the same, on the host, for the thread that writes checkpoints: threads share no group
    data: DeviceMesh  # one rank of each share of the sequences, among them this one
    model: ModelMeshes
    others: Mapping[str, ModelMeshes]  # of models besides the policy with a layout of their own, by their tables
    engines: DeviceMesh  # ranks that hold engines
    engine: DeviceMesh  # ranks that share this rank's engine; the first of them leads it
    weights: DeviceMesh | None  # disaggregated: the first training rank and the ranks that hold engines; else None

    def of(self, table: str) -> ModelMeshes:
        """The meshes of the model besides the policy that this table is about."""
        return self.others.get(table, self.model)

    @property
    def trains(self) -> bool:
        """True when this rank holds a part of the policy."""
        return self.training.get_coordinate() is not None

    @property
    def samples(self) -> bool:
        """True when this rank holds an engine, or a part of one."""
        return self.engines.get_coordinate() is not None

    @property
    def is_data_leader(self) -> bool:
        """True on the first of the ranks that work on the same sequences; it alone reports their metrics."""
        return self.training.get_local_rank() % self.ranks_per_share == 0

    @property
    def ranks_per_share(self) -> int:
        """The number of neighbouring ranks that work on the same sequences."""
        return self.training.size() // self.data.size()

    @property
    def engine_index(self) -> int:
        """The index of this rank's engine among all engines."""
        return self.engines.get_local_rank() // self.engine.size()

    @property
    def num_engines(self) -> int:
        """The number of engines of the run."""
        return self.engines.size() // self.engine.size()


def build_meshes(
    world: World,
    parallel: ParallelConfig | None = None,
    *,
    ranks_per_engine: int = 1,
    engine_ranks: int = 0,
    layouts: Mapping[str, ParallelConfig] = MappingProxyType({}),
) -> Meshes:
    """Build all meshes of a run, whose groups all wait for `world.patience`; every rank must call this.

    The last `engine_ranks` ranks only hold engines and the others only train; with 0 every rank does both. Neighbouring
    ranks share an engine. Training ranks are laid out as [dp_replicate, dp_shard, cp, tp], the last varying fastest, so
    that the ranks that exchange the most are neighbours. `layouts` are those of models besides the policy that differ
    in dp_replicate or ep, by their tables. `plan.plan_problems` checks that the sizes fit.
    """
    kind = world.device.type
    everyone = init_device_mesh(kind, (world.num_ranks,), mesh_dim_names=("world",))
    ranks = torch.arange(world.num_ranks)
    training_ranks, sampling_ranks = ranks[: world.num_ranks - engine_ranks], ranks[world.num_ranks - engine_ranks :]
    training = DeviceMesh(kind, training_ranks, mesh_dim_names=("training",)) if engine_ranks else everyone
    background = _background(training, training_ranks, world.patience)
    data, model = _training_meshes(kind, training_ranks, world.rank, parallel)
    distinct = {
        layout: _model_meshes(kind, training_ranks, world.rank, layout, cp=model.cp)
        for layout in dict.fromkeys(layouts.values())
    }
    if not engine_ranks:
        grid = init_device_mesh(kind, (world.num_ranks // ranks_per_engine, ranks_per_engine), mesh_dim_names=_GRID)
        engines, engine, weights = everyone, grid["engine"], None
    else:
        engines = DeviceMesh(kind, sampling_ranks, mesh_dim_names=("engines",))
        grid = DeviceMesh(kind, sampling_ranks.view(-1, ranks_per_engine), mesh_dim_names=_GRID)
        # torch refuses to select an axis on a rank that is not in the grid.
        engine = grid["engine"] if world.rank in sampling_ranks else grid
        weights = _weights(kind, torch.cat([training_ranks[:1], sampling_ranks]), world)
    _wait_for(world.patience)
    return Meshes(
        world=everyone,
        training=training,
        background=background,
        data=data,
        model=model,
        others={table: distinct[layout] for table, layout in layouts.items()},
        engines=engines,
        engine=engine,
        weights=weights,
    )


def _background(training: DeviceMesh, ranks: Tensor, patience: timedelta) -> DeviceMesh:
    """Build the group of the training ranks on the host; on other ranks, return `training`.

    Only members create it. On any other rank torch would take part in a split of the device's communicator, for which
    the members, who create a group of another backend, never call: the next split would wait for ever.
    """
    if training.get_coordinate() is None:
        return training
    host = "gloo" if "nccl" in dist.get_backend() else None  # None: the run's, which is on the host anyway
    group = dist.new_group(ranks.tolist(), timeout=patience, backend=host, use_local_synchronization=True)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("background",))


def _weights(kind: str, ranks: Tensor, world: World) -> DeviceMesh | None:
    """Build the group of these ranks; None on the others, which must call this all the same.

    A `DeviceMesh` with a bound device would name it after the number of groups that a rank is already in, which differs
    between a rank that trains and one that samples; under two names they would not meet. This name counts calls.
    """
    group = dist.new_group(ranks.tolist(), timeout=world.patience)
    return DeviceMesh.from_group(group, kind, mesh_dim_names=("weights",)) if world.rank in ranks else None


def _wait_for(patience: timedelta) -> None:
    """Let every group that this rank is in give up after `patience`; torch gives 30 minutes to those of a mesh."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(patience, group)


_GRID = ("engines", "engine")


def _training_meshes(
    kind: str, ranks: Tensor, me: int, parallel: ParallelConfig | None
) -> tuple[DeviceMesh, ModelMeshes]:
    """Build the data mesh and the policy's meshes from the training ranks."""
    cp, tp = (1, 1) if parallel is None else (parallel.cp, parallel.tp)
    chunks = _axis_of(kind, "cp", ranks.view(-1, cp, tp).transpose(1, 2).flatten(0, 1), me)
    data = _axis_of(kind, "data", ranks.view(-1, cp * tp).t(), me)
    return data, _model_meshes(kind, ranks, me, parallel, cp=chunks)


def _model_meshes(kind: str, ranks: Tensor, me: int, parallel: ParallelConfig | None, *, cp: DeviceMesh) -> ModelMeshes:
    """Build a model's meshes from the training ranks; those of `cp` compute chunks of the same tokens."""
    replicate = tp = ep = 1
    style: Literal["all_gather", "ulysses"] = "all_gather"
    if parallel is not None:
        replicate, tp, ep, style = parallel.dp_replicate, parallel.tp, parallel.ep, parallel.cp_style
    dense = DeviceMesh(kind, ranks.view(replicate, -1, tp), mesh_dim_names=("replicate", "shard", "tp"))
    expert = None
    if ep > 1:
        expert = DeviceMesh(kind, ranks.view(replicate, -1, ep), mesh_dim_names=("replicate", "expert_shard", "ep"))
    return ModelMeshes(dense, expert, copy=_axis_of(kind, "copy", ranks.view(replicate, -1), me), cp=cp, cp_style=style)


def _axis_of(kind: str, name: str, groups: Tensor, me: int) -> DeviceMesh:
    """Build groups [n, ranks in each] and return this rank's group; any mesh on a rank that is in none."""
    grid = DeviceMesh(kind, groups, mesh_dim_names=(f"{name}_groups", name))
    return grid[name] if me in groups else grid
