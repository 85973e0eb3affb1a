"""What a run trains: the policy, and a critic where advantages need one."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spmdrl.config import Config, OptimConfig, SftConfig
from spmdrl.config.plan import Plan
from spmdrl.dist.mesh import ModelMeshes
from spmdrl.learn.coefficients import starting_coefficients
from spmdrl.learn.objective import ObjectiveFunction, PolicyObjective, ValueObjective
from spmdrl.learn.update import Learner
from spmdrl.model.load import load_critic
from spmdrl.model.policy import Policy

POLICY, CRITIC = "policy", "critic"


def optimizers_of(cfg: Config | SftConfig) -> dict[str, OptimConfig]:
    """How each learner is optimized, by its name."""
    if isinstance(cfg, Config) and cfg.has_critic:
        return {POLICY: cfg.optim, CRITIC: cfg.critic_optim}
    return {POLICY: cfg.optim}


def start_learners(
    policy: Policy, cfg: Config, plan: Plan, meshes: ModelMeshes, *, dtype: torch.dtype
) -> dict[str, Learner]:
    """Learners that have learned nothing yet, by the names they have in checkpoints; loads the critic."""
    optimizers = optimizers_of(cfg)
    learners = {
        POLICY: Learner.start(
            policy,
            optimizers[POLICY],
            num_updates=plan.num_updates,
            dtype=dtype,
            frozen_steps=cfg.critic.warmup_steps,
            coefficients=starting_coefficients(cfg),
        )
    }
    if CRITIC in optimizers:
        critic = load_critic(cfg.critic_model, meshes)
        learners[CRITIC] = Learner.start(
            critic, optimizers[CRITIC], num_updates=plan.num_updates, dtype=dtype, area="critic"
        )
    return learners


def objectives_of(cfg: Config, learners: Mapping[str, Learner]) -> dict[str, ObjectiveFunction]:
    """What each learner minimises."""
    known: dict[str, ObjectiveFunction] = {
        POLICY: PolicyObjective(cfg.loss, learners[POLICY].coefficients, cfg.correction, cfg.mismatch),
        CRITIC: ValueObjective(cfg.critic.clip_value),
    }
    return {name: known[name] for name in learners}
