"""What a batch needs before its updates, from old log-probabilities to what is settled over the whole of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.metrics import Metrics
from spmdrl.algo.seeds import mix
from spmdrl.config import Config, CorrectionConfig, LossConfig
from spmdrl.config.plan import Plan, needs_old_logprobs
from spmdrl.dist.collectives import failing_together
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.learners import CRITIC, POLICY
from spmdrl.learn.mismatch import correct
from spmdrl.learn.update import Learner
from spmdrl.model.load import reshard
from spmdrl.model.policy import PackedModel, Policy
from spmdrl.step.batch import MiniBatch
from spmdrl.step.credit import assign_credit, choose_tokens
from spmdrl.types import MicroBatch, TrainingDiverged

USUAL_LOSS, NO_CORRECTION = LossConfig(), CorrectionConfig()


def prepare(
    learners: Mapping[str, Learner],
    reference: Policy | None,
    mini_batches: list[MiniBatch],
    cfg: Config,
    plan: Plan,
    meshes: Meshes,
    *,
    step: int,
) -> tuple[list[MiniBatch], Metrics]:
    """Complete a step's mini-batches, and say what that showed. Every rank that trains must call this.

    Rejections come before the choice of tokens, so that what has left the batch is not chosen.
    """
    policy, critic = learners[POLICY], learners.get(CRITIC)
    scored = add_logprobs(
        policy.model,
        reference,
        mini_batches,
        meshes.training,
        cfg.loss,
        cfg.correction,
        kl_in_reward=cfg.reward.kl_coef > 0,
    )
    if critic is not None:
        scored = add_values(critic.model, scored, meshes.training)
    credited, metrics = assign_credit(scored, cfg, policy.coefficients, meshes)
    corrected = correct(credited, cfg.correction, plan, meshes, aggregation=cfg.loss.aggregation)
    return choose_tokens(corrected, cfg.loss, meshes.data, seed=mix(cfg.run.seed, step)), metrics


def add_logprobs(
    policy: PackedModel,
    reference: Policy | None,
    mini_batches: list[MiniBatch],
    mesh: DeviceMesh,
    loss: LossConfig = USUAL_LOSS,
    correction: CorrectionConfig = NO_CORRECTION,
    *,
    kl_in_reward: bool = False,
) -> list[MiniBatch]:
    """Add `old_logprobs`, when they are needed before the update (`plan.needs_old_logprobs`) or are the engine's, and
    `ref_logprobs`, when there is a reference. Every rank of the mesh must call this.

    With one mini-batch the policy has not moved in this step before its only update, so that for the ratio no pass is
    needed. Where older weights sampled the beginning of a rollout, the difference is part of the mismatch, not of the
    ratio.
    """
    device = torch.device(mesh.device_type)
    columns: dict[str, list[list[Tensor]]] = {}
    if correction.old == "rollout":
        columns["old_logprobs"] = [[m.rollout_logprobs for m in mini_batch] for mini_batch in mini_batches]
    elif needs_old_logprobs(loss, correction, num_updates=len(mini_batches), kl_in_reward=kl_in_reward):
        columns["old_logprobs"] = _columns(lambda m: policy(m).logprobs, mini_batches, device)
    if reference is not None:
        columns["ref_logprobs"] = _columns(lambda m: reference(m).logprobs, mini_batches, device)
    return _with_columns(mini_batches, columns, mesh)


def add_values(critic: PackedModel, mini_batches: list[MiniBatch], mesh: DeviceMesh) -> list[MiniBatch]:
    """Add the critic's `values`. Every rank of the mesh must call this."""
    columns = {"values": _columns(critic, mini_batches, torch.device(mesh.device_type))}
    reshard(critic)  # the policy is updated before it, and needs the memory
    return _with_columns(mini_batches, columns, mesh)


def _columns(
    forward: Callable[[MicroBatch], Tensor], mini_batches: list[MiniBatch], device: torch.device
) -> list[list[Tensor]]:
    """[T] of every micro-batch, without gradients; on the host, as micro-batches are until they run."""
    with torch.no_grad():
        return [[forward(m.to(device)).cpu() for m in mini_batch] for mini_batch in mini_batches]


def _with_columns(
    mini_batches: list[MiniBatch], columns: Mapping[str, list[list[Tensor]]], mesh: DeviceMesh
) -> list[MiniBatch]:
    """The micro-batches with these columns, which must be finite on every rank."""
    with failing_together(mesh):
        for name, column in columns.items():
            _require_finite(name, [x for mini_batch in column for x in mini_batch])
    return [
        [m.with_columns({name: column[i][j] for name, column in columns.items()}) for j, m in enumerate(mini_batch)]
        for i, mini_batch in enumerate(mini_batches)
    ]


def _require_finite(name: str, values: list[Tensor]) -> None:
    for value in values:
        if not torch.isfinite(value).all():
            raise TrainingDiverged(f"{name} are not finite; no weights were changed")
