"""Checkpoints: everything a run needs to go on, written under a temporary name and renamed when it is whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from spmdrl.checkpoint_reader import load_data_only
from spmdrl.dist.collectives import barrier
from spmdrl.types import UserError
from spmdrl.update import Learner

_STATE = "state.json"
_COLLECTOR = "collector.json"
_PREFIX = "step-"


def newest_step(folder: Path) -> int:
    """The step of the newest whole checkpoint, 0 when nothing was saved.

    Raises UserError when there are only unfinished ones, instead of starting over.
    """
    whole = _whole(folder)
    if not whole and (unfinished := sorted(path.name for path in folder.glob("*"))):
        raise UserError(
            f"{folder} holds only unfinished checkpoints ({', '.join(unfinished)}); remove them to start from "
            "step 0, or set run.name to start a new run"
        )
    return int(whole[-1].name.removeprefix(_PREFIX)) if whole else 0


def _whole(folder: Path) -> list[Path]:
    """Checkpoints that were finished, oldest first."""
    return sorted(path.parent for path in folder.glob(f"{_PREFIX}*/{_STATE}") if "." not in path.parent.name)


def save(
    folder: Path,
    learner: Learner,
    mesh: DeviceMesh,
    *,
    step: int,
    keep_last: int,
    collector: Mapping[str, Any] | None = None,
) -> None:
    """Write the state after `step`; every rank of the mesh writes its shards and must call this.

    `collector` is the state of a `Collector`, the same on every rank.
    """
    final = _folder_of(folder, step)
    unfinished = final.with_suffix(".unfinished")
    is_first = mesh.get_local_rank() == 0
    if is_first:
        for leftover in (final, unfinished):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished.mkdir(parents=True)
    barrier(mesh)
    weights, optimizer = get_state_dict(learner.policy, learner.optimizer)
    dcp.save(_parts(weights, optimizer), checkpoint_id=unfinished, process_group=mesh.get_group())
    if is_first:
        if collector is not None:
            (unfinished / _COLLECTOR).write_text(json.dumps(collector), encoding="utf-8")
        state = {
            "optimizer": _kind(learner),
            "step": step,
            "loss_scale": dataclasses.asdict(learner.loss_scale),
            "coefficients": learner.coefficients,
        }
        (unfinished / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
        unfinished.rename(final)
        for old in _whole(folder)[:-keep_last]:
            shutil.rmtree(old)
    barrier(mesh)


def _kind(learner: Learner) -> str:
    """What decides which state the optimizer has."""
    return f'"{learner.optim.name}"' + (" with momentum" if learner.optim.momentum else "")


def _parts(weights: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """What a checkpoint holds of both: not the optimizer's settings, which are the launch's and may be changed on
    purpose, nor how it groups parameters, which depends on the ranks they are split over."""
    return tree_map(_in_chunks, {"policy": weights, "optimizer": {"state": optimizer["state"]}})


def _in_chunks(value: Any) -> Any:
    """A DTensor of which this rank has two parts that are not neighbours, as torch's checkpoints want to be told of it;
    it shares the memory. Everything else as it is.

    Such are experts over tp: a rank has a part of the gate's features and the same part of those of the up projection.
    """
    packed = _packed_axis(value)
    if packed is None:
        return value
    placement, local = value.placements[packed], value.to_local()
    size = value.shape[placement.dim] // placement.split_factor
    within = value.device_mesh.get_local_rank(packed) * size // value.device_mesh.size(packed)
    _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    parts = list(local.chunk(placement.split_factor, placement.dim))
    offsets = [
        (*start[: placement.dim], number * size + within, *start[placement.dim + 1 :]) for number in range(len(parts))
    ]
    return DTensor(LocalShardsWrapper(parts, offsets), value._spec, requires_grad=False)


def _packed_axis(value: Any) -> int | None:
    """The axis of a DTensor's mesh along which its parts are not neighbours, if there is one."""
    if not isinstance(value, DTensor):
        return None
    for axis, placement in enumerate(value.placements):
        # Where a second axis splits the same dimension, "strided" only says which of the two splits first.
        if isinstance(placement, _StridedShard):
            dims = [getattr(other, "dim", None) for other in value.placements]
            if dims.count(placement.dim) == 1:
                return axis
    return None


def restore(folder: Path, learner: Learner, mesh: DeviceMesh, *, step: int) -> None:
    """Load the checkpoint of `step` in place; step 0 is the model as it was loaded. Every rank of the mesh must call
    this.

    Random numbers need nothing: what they are for decides them. Where the prompts go on is in `collector_state`.
    """
    if step == 0:
        return
    checkpoint = _folder_of(folder, step)
    saved = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    if (before := saved.get("optimizer", _kind(learner))) != _kind(learner):
        raise UserError(
            f"the checkpoint of step {step} holds the state of optim.name = {before}, but now it is {_kind(learner)}; "
            "set it back, or start a new run from the exported model"
        )
    weights, optimizer = get_state_dict(learner.policy, learner.optimizer)
    load_data_only(_parts(weights, optimizer), checkpoint, mesh.get_group())
    set_state_dict(learner.policy, learner.optimizer, model_state_dict=weights, optim_state_dict=optimizer)
    learner.loss_scale.scale = saved["loss_scale"]["scale"]
    learner.loss_scale.good_updates = saved["loss_scale"]["good_updates"]
    # Only those that this launch adapts too: a coefficient that is fixed now is what the configuration says.
    learner.coefficients.update({name: saved["coefficients"].get(name, x) for name, x in learner.coefficients.items()})


def collector_state(folder: Path, *, step: int) -> dict[str, Any] | None:
    """What `save` was given as `collector` after `step`; None when there was nothing, as at step 0."""
    path = _folder_of(folder, step) / _COLLECTOR
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _folder_of(folder: Path, step: int) -> Path:
    return folder / f"{_PREFIX}{step:08d}"
