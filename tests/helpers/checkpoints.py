"""Checkpoints for tests that are about other things."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from spmdrl.checkpoint import Saver
from spmdrl.config import CheckpointConfig
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.learner import Learner


def save_and_wait(folder: str | Path, learners: Mapping[str, Learner], meshes: Meshes, *, step: int) -> None:
    """Save the state after `step` and wait until it is on disk; every rank of the mesh must call this."""
    cfg = CheckpointConfig(keep_last=9)
    saver = Saver(Path(folder), learners, meshes, cfg, configuration={}, versions={})
    saver.save(step, metrics={})
    saver.wait()
