"""Loading: what a checkpoint holds, in place, over whatever ranks there are now."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.checkpoint.places import folder_of
from spmdrl.checkpoint.storage import LoadPlanner, Reader
from spmdrl.checkpoint.tensors import LearnerState, in_chunks, tree_of
from spmdrl.checkpoint.write import COLLECTOR, STATE, kind_of_optimizer
from spmdrl.model.policy import PackedModel
from spmdrl.types import UserError
from spmdrl.update import Learner


def restore(folder: Path, learners: Mapping[str, Learner], mesh: DeviceMesh, *, step: int) -> None:
    """Load the checkpoint of `step` in place; step 0, unless it was saved, is the model as it was loaded. Every rank of
    the mesh must call this.

    Random numbers need nothing: what they are for decides them. Where the prompts go on is in `collector_state`.
    """
    checkpoint = folder_of(folder, step)
    if step == 0 and not checkpoint.exists():
        return
    saved = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["learners"]
    _refuse_other_state(saved, learners, step)
    states = {name: LearnerState.to_fill(learner) for name, learner in learners.items()}
    tree = in_chunks(tree_of(states))
    dcp.load(tree, storage_reader=Reader(checkpoint), planner=LoadPlanner(), process_group=mesh.get_group())
    for name, learner in learners.items():
        set_state_dict(
            learner.model,
            learner.optimizer,
            model_state_dict=states[name].weights,
            optim_state_dict=cast(Any, states[name].optimizer),
        )
        if not saved[name]["has_state"]:  # what was saved is torch's invention
            learner.optimizer.state.clear()
        _restore_numbers(learner, saved[name])


def restore_weights(checkpoint: Path, model: PackedModel, mesh: DeviceMesh, *, name: str) -> None:
    """Load the weights of one learner and nothing else; every rank of the mesh must call this."""
    weights = get_model_state_dict(model)
    tree = in_chunks({name: {"weights": weights}})
    dcp.load(tree, storage_reader=Reader(checkpoint), planner=LoadPlanner(), process_group=mesh.get_group())
    set_model_state_dict(model, weights)


def _refuse_other_state(saved: Mapping[str, Any], learners: Mapping[str, Learner], step: int) -> None:
    if saved.keys() != learners.keys():
        raise UserError(
            f"the checkpoint of step {step} holds {' and '.join(saved)}, but this run trains {' and '.join(learners)}; "
            "set advantage.estimator back, or start a new run from the exported model"
        )
    for name, learner in learners.items():
        if (before := saved[name]["optimizer"]) != (now := kind_of_optimizer(learner)):
            raise UserError(
                f"the checkpoint of step {step} holds the state of optim.name = {before}, but now it is {now}; "
                "set it back, or start a new run from the exported model"
            )


def _restore_numbers(learner: Learner, saved: Mapping[str, Any]) -> None:
    learner.loss_scale.scale = saved["loss_scale"]["scale"]
    learner.loss_scale.good_updates = saved["loss_scale"]["good_updates"]
    # Only those that this launch adapts too: a coefficient that is fixed now is what the configuration says.
    learner.coefficients.update({name: saved["coefficients"].get(name, x) for name, x in learner.coefficients.items()})


def collector_state(folder: Path, *, step: int) -> dict[str, Any] | None:
    """What `save` was given as `collector` after `step`; None when there was nothing, as where a run begins."""
    path = folder_of(folder, step) / COLLECTOR
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
