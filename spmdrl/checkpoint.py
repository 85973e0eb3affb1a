"""Checkpoints: everything a run needs to go on, written under a temporary name and renamed when it is whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import barrier
from spmdrl.model.policy import Policy
from spmdrl.types import UserError
from spmdrl.update import LossScale

_STATE = "state.json"


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint. Raises UserError when there are only partial ones, instead of starting over."""
    if not folder.is_dir():
        return None
    whole = sorted(path.parent for path in folder.glob(f"step-*/{_STATE}"))
    if not whole and (partial := sorted(folder.iterdir())):
        raise UserError(
            f"{folder} holds only unfinished checkpoints ({', '.join(path.name for path in partial)}); remove them to "
            "start from step 0, or set run.name to start a new run"
        )
    return whole[-1] if whole else None


def save(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    loss_scale: LossScale,
    mesh: DeviceMesh,
    *,
    step: int,
    keep_last: int,
) -> None:
    """Write the state after `step`; every rank of the mesh writes its shards and must call this."""
    final = folder / f"step-{step:08d}"
    unfinished = final.with_suffix(".unfinished")
    is_first = mesh.get_local_rank() == 0
    if is_first:
        for leftover in (final, unfinished):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier(mesh)
    weights, moments = get_state_dict(policy, optimizer)
    dcp.save({"policy": weights, "optimizer": moments}, checkpoint_id=unfinished)
    if is_first:
        state = {"step": step, "loss_scale": dataclasses.asdict(loss_scale)}
        (unfinished / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        unfinished.rename(final)
        for old in sorted(path.parent for path in folder.glob(f"step-*/{_STATE}"))[:-keep_last]:
            shutil.rmtree(old)
    barrier(mesh)


def restore_latest(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, loss_scale: LossScale) -> int:
    """Load the newest whole checkpoint in place and return its step; 0 when there is none.

    Prompts need nothing: the step decides them.
    """
    checkpoint = newest(folder)
    if checkpoint is None:
        return 0
    weights, moments = get_state_dict(policy, optimizer)
    state = {"policy": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(policy, optimizer, model_state_dict=state["policy"], optim_state_dict=state["optimizer"])
    saved = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    loss_scale.scale = saved["loss_scale"]["scale"]
    loss_scale.good_updates = saved["loss_scale"]["good_updates"]
    return int(saved["step"])
