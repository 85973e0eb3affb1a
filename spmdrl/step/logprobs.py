"""The passes before a step's updates: log-probabilities of policy, reference and teachers, and a critic's values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config
from spmdrl.config.plan import takes_old_pass
from spmdrl.dist.collectives import raise_on_all_ranks
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.learner import CRITIC, POLICY, Learner
from spmdrl.model.frozen import FrozenModel
from spmdrl.model.policy import Policy
from spmdrl.model.sharding import reshard
from spmdrl.step.batch import Batch
from spmdrl.step.teachers import FrozenModels
from spmdrl.types import MicroBatch, TrainingDiverged

Forward = Callable[[MicroBatch], Tensor]


def add_logprobs(
    batch: Batch, learners: Mapping[str, Learner], frozen: FrozenModels, cfg: Config, meshes: Meshes
) -> Batch:
    """Add `old_logprobs` where something needs them before the updates (`config.plan.takes_old_pass`) or they are
    the engine's, `ref_logprobs` where there is a reference, what teachers say, and `values` where there is a critic.
    Every rank that trains must call this.

    With one mini-batch the policy has not moved in this step before its only update, so the ratio needs no pass. Where
    older weights sampled the beginning of a rollout, the difference is part of the mismatch, not of the ratio.
    """
    needs_pass = takes_old_pass(cfg, num_updates=len(batch.mini_batches))
    routes: list[Tensor] | None = [] if cfg.correction.router_replay == "R2" else None
    forwards: dict[str, Forward] = {}
    if cfg.correction.old == "rollout":
        forwards["old_logprobs"] = lambda micro_batch: micro_batch.rollout_logprobs
    elif needs_pass:
        forwards["old_logprobs"] = partial(_old_logprobs, learners[POLICY], routes)
    if CRITIC in learners:
        forwards["values"] = learners[CRITIC].model
    batch = add_columns(batch, forwards, meshes.training)
    if CRITIC in learners:
        reshard(learners[CRITIC].model)  # what computes next needs the memory
    if routes:
        both = zip(batch.micro_batches, routes, strict=True)
        batch = batch.with_micro_batches(replace(micro_batch, routes=taken) for micro_batch, taken in both)
    return frozen.teach(add_reference(batch, frozen.reference, meshes.training), meshes)


def _old_logprobs(learner: Learner, routes: list[Tensor] | None, micro_batch: MicroBatch) -> Tensor:
    """Compute the policy's log-probabilities before the updates; appends the routes that it has taken for that."""
    logprobs: Tensor = learner.model(micro_batch).logprobs
    if routes is not None:
        assert isinstance(learner.model, Policy)
        routes.append(learner.model.own_routes(micro_batch))
    return logprobs


def add_reference(batch: Batch, reference: FrozenModel | None, mesh: DeviceMesh) -> Batch:
    """Add `ref_logprobs` where there is a reference, in its turn. Calls `add_columns`."""
    if reference is None:
        return batch
    with reference.turn():
        return add_columns(batch, {"ref_logprobs": lambda micro_batch: reference(micro_batch).logprobs}, mesh)


def add_columns(batch: Batch, forwards: Mapping[str, Forward], mesh: DeviceMesh) -> Batch:
    """Add the columns that these forwards compute, one after the other, without gradients; every rank of the mesh must
    call this. Raises TrainingDiverged on all of them when a value is not finite on any.

    Columns stay on the host, as micro-batches do until they are trained on.
    """
    with torch.no_grad():
        columns = {
            name: [forward(micro_batch).cpu() for micro_batch in batch.micro_batches]
            for name, forward in forwards.items()
        }
    with raise_on_all_ranks(mesh):
        for name, column in columns.items():
            if not all(torch.isfinite(values).all() for values in column):
                raise TrainingDiverged(f"{name} are not finite; no weights were changed")
    return batch.with_micro_batches(
        micro_batch.with_columns({name: column[place] for name, column in columns.items()})
        for place, micro_batch in enumerate(batch.micro_batches)
    )
