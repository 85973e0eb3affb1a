"""A learner: one model with all that its training changes, and the rules by which it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.metrics import Metrics, scalars
from spmdrl.config import Config, MismatchLimits, OptimConfig, TuningConfig
from spmdrl.config.plan import Plan
from spmdrl.dist.collectives import merge_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.coefficients import starting_coefficients
from spmdrl.learn.correction import exceeded
from spmdrl.learn.objective import DRIFT, ObjectiveFunction, ValueObjective
from spmdrl.learn.optim import make_optimizer
from spmdrl.learn.source_objective import policy_objective
from spmdrl.model.frozen import Follower
from spmdrl.model.load import load_critic
from spmdrl.model.param_groups import patterns_of
from spmdrl.model.policy import PackedModel, Policy
from spmdrl.types import TrainingDiverged

# Checks made before an optimizer step.
#
# Mismatch limits end the run; a KL limit skips the step's remaining updates.


NO_LIMITS = MismatchLimits()
NO_FOLLOWERS: Mapping[str, Follower] = MappingProxyType({})
MISMATCH = "mismatch/max_abs_nats"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGuards:
    """Limits on the metrics of an update, merged over all ranks."""

    mesh: DeviceMesh
    stop: MismatchLimits = NO_LIMITS
    assert_on_policy: bool = False
    exact: bool = False  # engine and trainer must have computed the same bits
    only_first_compares: bool = False  # only the first update of a step knows the trainer's own logprobs
    stop_kl_nats: float | None = None

    @classmethod
    def of(cls, cfg: Config, mesh: DeviceMesh) -> UpdateGuards | None:
        """Return the limits that are set, over the ranks that train; None when there are none."""
        guards = cls(
            mesh=mesh,
            stop=cfg.mismatch.stop,
            assert_on_policy=cfg.debug.assert_on_policy,
            exact=cfg.true_on_policy and cfg.debug.load_rollouts is None,  # files promise nothing
            only_first_compares=cfg.correction.old == "rollout",
            stop_kl_nats=cfg.loss.stop_kl_nats,
        )
        return None if guards == cls(mesh=mesh, only_first_compares=guards.only_first_compares) else guards

    def check(self, local: Metrics, *, is_first: bool, where: str) -> bool:
        """Return True when the KL from the policy before the step exceeds `stop_kl_nats`; the same on every rank.

        Every rank of the mesh calls this with its own metrics. Raises TrainingDiverged on all of them, or on none, when
        the update must not change the weights. `is_first`: the policy has not moved in this step.
        """
        values = scalars(merge_over(self.mesh, local))
        problems = self._mismatched(values) if is_first or not self.only_first_compares else []
        if is_first and self.assert_on_policy:
            problems += _off_policy_clause(values)
        if problems:
            raise TrainingDiverged(f"{where}: {'; '.join(problems)}; no weights were changed")
        return self.stop_kl_nats is not None and values.get(DRIFT, 0.0) > self.stop_kl_nats

    def _mismatched(self, values: Mapping[str, float]) -> list[str]:
        """Return a clause for each limit on the mismatch that is exceeded."""
        problems = exceeded(values, self.stop)
        if self.exact and (mismatch := values.get(MISMATCH, 0.0)) != 0:
            problems.append(f"{MISMATCH} is {mismatch:.3g}, and true_on_policy = true promises 0")
        return problems


def _off_policy_clause(values: Mapping[str, float]) -> list[str]:
    """Return a clause when the ratios of a policy that has not moved are not 1; a step without loss tokens passes."""
    # k1, not k3: a difference in the last bit is rounded away in k3.
    deviation, k1 = values.get("update/ratio_max_deviation", 0.0), values.get("update/k1_old_nats", 0.0)
    if deviation == 0 and not abs(k1) > 0:
        return []
    return [f"the policy has not moved in this step, but max |ratio - 1| is {deviation:.3g} and its k1 {k1:.3g} nats"]


@dataclass(slots=True)
class LossScale:
    """Dynamic scaling of the loss, so that float16 gradients do not underflow; 1 and inert for other dtypes.

    An overflow halves the scale and leaves the weights alone; `growth_interval` updates without one double it.
    """

    scale: float = 1.0
    dynamic: bool = False
    growth_interval: int = 200
    good_updates: int = 0

    @classmethod
    def for_dtype(cls, dtype: torch.dtype) -> LossScale:
        """Start at 2^16 for float16, else at an inert 1."""
        return cls(scale=65536.0, dynamic=True) if dtype == torch.float16 else cls()

    def overflowed(self) -> bool:
        """Note that gradients are not finite. Returns True when the scale is to blame; it has been lowered then."""
        if not self.dynamic or self.scale <= 1.0:
            return False
        self.scale, self.good_updates = self.scale / 2, 0
        return True

    def succeeded(self) -> None:
        """Note that an optimizer step was taken."""
        self.good_updates += 1
        if self.dynamic and self.good_updates % self.growth_interval == 0:
            self.scale *= 2


@dataclass(slots=True, eq=False)
class Learner:
    """One model in training: its optimizer and loss scale, what it minimises, and the guards of its updates.

    A new one has learned nothing yet.
    """

    model: PackedModel
    optim: OptimConfig
    objective: ObjectiveFunction
    _: KW_ONLY
    num_updates: int  # optimizer steps of the whole run
    dtype: torch.dtype  # of forward and backward
    guards: UpdateGuards | None = None
    area: str = "update"  # the first part of its metrics' names
    frozen_steps: int = 0  # at the start, in which it learns nothing
    coefficients: dict[str, float] = field(default_factory=dict)  # see `coefficients.py`; changed in place
    followers: Mapping[str, Follower] = field(default_factory=dict)  # copies of the model that follow it, by name
    optimizer: torch.optim.Optimizer = field(init=False)
    loss_scale: LossScale = field(init=False)

    def __post_init__(self) -> None:
        patterns = patterns_of(self.model.model, self.optim.rates)
        self.optimizer = make_optimizer(self.model, self.optim, patterns)
        self.loss_scale = LossScale.for_dtype(self.dtype)


# The learners of a run: the policy, and a critic where advantages need one.


POLICY, CRITIC = "policy", "critic"


def optimizers_of(cfg: Config | TuningConfig) -> dict[str, OptimConfig]:
    """The optimizer settings of each learner, by its name."""
    if isinstance(cfg, Config) and cfg.has_critic:
        return {POLICY: cfg.optim, CRITIC: cfg.critic_optim}
    return {POLICY: cfg.optim}


def start_learners(
    policy: Policy,
    cfg: Config,
    plan: Plan,
    meshes: Meshes,
    *,
    dtype: torch.dtype,
    followers: Mapping[str, Follower] = NO_FOLLOWERS,
) -> dict[str, Learner]:
    """Make the learners of a run, by their names in checkpoints; loads the critic where advantages need one.

    `followers` are the copies of the policy that follow it, by name."""
    optimizers, coefficients = optimizers_of(cfg), starting_coefficients(cfg)
    learners = {
        POLICY: Learner(
            policy,
            optimizers[POLICY],
            policy_objective(cfg, coefficients, longest_tokens=plan.max_sequence_tokens),
            num_updates=plan.num_updates,
            dtype=dtype,
            guards=UpdateGuards.of(cfg, meshes.training),
            frozen_steps=cfg.critic.warmup_steps,
            coefficients=coefficients,  # the objective sees how they change
            followers=followers,
        )
    }
    if CRITIC in optimizers:
        learners[CRITIC] = Learner(
            load_critic(cfg.critic_model, meshes.model),
            optimizers[CRITIC],
            ValueObjective(cfg.critic.clip_value),
            num_updates=plan.num_updates,
            dtype=dtype,
            area="critic",
        )
    return learners
