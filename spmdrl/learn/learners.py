"""The learners of a run: the policy, and a critic where advantages need one."""

from __future__ import annotations

import torch

from spmdrl.config import Config, OptimConfig, SftConfig
from spmdrl.config.plan import Plan
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.coefficients import starting_coefficients
from spmdrl.learn.learner import Learner
from spmdrl.learn.limits import Limits
from spmdrl.learn.objective import PolicyObjective, ValueObjective
from spmdrl.model.load import load_critic
from spmdrl.model.policy import Policy

POLICY, CRITIC = "policy", "critic"


def optimizers_of(cfg: Config | SftConfig) -> dict[str, OptimConfig]:
    """The optimizer settings of each learner, by its name."""
    if isinstance(cfg, Config) and cfg.has_critic:
        return {POLICY: cfg.optim, CRITIC: cfg.critic_optim}
    return {POLICY: cfg.optim}


def start_learners(
    policy: Policy, cfg: Config, plan: Plan, meshes: Meshes, *, dtype: torch.dtype
) -> dict[str, Learner]:
    """Make the learners of a run, by their names in checkpoints; loads the critic where advantages need one."""
    optimizers, coefficients = optimizers_of(cfg), starting_coefficients(cfg)
    learners = {
        POLICY: Learner.start(
            policy,
            optimizers[POLICY],
            PolicyObjective(cfg.loss, coefficients, cfg.correction, cfg.mismatch),
            num_updates=plan.num_updates,
            dtype=dtype,
            limits=Limits.of(cfg, meshes.training),
            frozen_steps=cfg.critic.warmup_steps,
            coefficients=coefficients,  # the objective sees how they change
        )
    }
    if CRITIC in optimizers:
        learners[CRITIC] = Learner.start(
            load_critic(cfg.critic_model, meshes.model),
            optimizers[CRITIC],
            ValueObjective(cfg.critic.clip_value),
            num_updates=plan.num_updates,
            dtype=dtype,
            area="critic",
        )
    return learners
