"""A step's groups, and columns of its micro-batches gathered by sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from spmdrl.config import Config
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import Meshes
from spmdrl.types import MicroBatch
from tests.helpers.configs import minimal_config

COUNT, GROUP_SIZE, SEED = 16, 4, 7


def by_sequence(column: Tensor, micro_batch: MicroBatch) -> Iterator[tuple[int, list[float]]]:
    seqlens = micro_batch.seqlens
    parts = zip(micro_batch.sequence_index, column.split(seqlens), micro_batch.loss_mask.split(seqlens), strict=True)
    yield from ((index, part[mask].tolist()) for index, part, mask in parts if index >= 0)


def everywhere(columns: list[tuple[Tensor | None, MicroBatch]], meshes: Meshes) -> dict[int, list[float]]:
    mine = {
        index: values
        for column, micro_batch in columns
        if column is not None
        for index, values in by_sequence(column, micro_batch)
    }
    return {index: values for part in gather_objects(meshes.training, mine) for index, values in part.items()}


def groups_config(**tables: dict[str, Any]) -> Config:
    """A configuration whose steps have these groups."""
    rollout = {"prompts_per_step": COUNT // GROUP_SIZE, "group_size": GROUP_SIZE, "max_response_tokens": 32}
    return minimal_config(**({"rollout": rollout} | tables))
