"""Checks made before an optimizer step.

Mismatch limits end the run; a KL limit skips the step's remaining updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.metrics import Metrics, scalars
from spmdrl.config import Config, MismatchLimits
from spmdrl.dist.collectives import merge_over
from spmdrl.learn.mismatch import exceeded
from spmdrl.learn.objective import DRIFT
from spmdrl.types import TrainingDiverged

NO_LIMITS = MismatchLimits()
MISMATCH = "mismatch/max_abs_nats"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the metrics of an update, merged over all ranks."""

    mesh: DeviceMesh
    stop: MismatchLimits = NO_LIMITS
    assert_on_policy: bool = False
    exact: bool = False  # engine and trainer must have computed the same bits
    only_first_compares: bool = False  # only the first update of a step knows the trainer's own logprobs
    stop_kl_nats: float | None = None

    @classmethod
    def of(cls, cfg: Config, mesh: DeviceMesh) -> Limits | None:
        """Return the limits that are set, over the ranks that train; None when there are none."""
        limits = cls(
            mesh=mesh,
            stop=cfg.mismatch.stop,
            assert_on_policy=cfg.debug.assert_on_policy,
            exact=cfg.true_on_policy and cfg.debug.load_rollouts is None,  # files promise nothing
            only_first_compares=cfg.correction.old == "rollout",
            stop_kl_nats=cfg.loss.stop_kl_nats,
        )
        return None if limits == cls(mesh=mesh, only_first_compares=limits.only_first_compares) else limits

    def check(self, local: Metrics, *, is_first: bool, where: str) -> bool:
        """Return True when the KL from the policy before the step exceeds `stop_kl_nats`; the same on every rank.

        Every rank of the mesh calls this with its own metrics. Raises TrainingDiverged on all of them, or on none, when
        the update must not change the weights. `is_first`: the policy has not moved in this step.
        """
        values = scalars(merge_over(self.mesh, local))
        problems = self._mismatched(values) if is_first or not self.only_first_compares else []
        if is_first and self.assert_on_policy:
            problems += _moved(values)
        if problems:
            raise TrainingDiverged(f"{where}: {'; '.join(problems)}; no weights were changed")
        return self.stop_kl_nats is not None and values.get(DRIFT, 0.0) > self.stop_kl_nats

    def _mismatched(self, values: Mapping[str, float]) -> list[str]:
        """Return a clause for each limit on the mismatch that is exceeded."""
        problems = exceeded(values, self.stop)
        if self.exact and (mismatch := values.get(MISMATCH, 0.0)) != 0:
            problems.append(f"{MISMATCH} is {mismatch:.3g}, and true_on_policy = true promises 0")
        return problems


def _moved(values: Mapping[str, float]) -> list[str]:
    """Return a clause when the ratios of a policy that has not moved are not 1; a step without loss tokens passes."""
    # k1, not k3: a difference in the last bit is rounded away in k3.
    deviation, k1 = values.get("update/ratio_max_deviation", 0.0), values.get("update/k1_old_nats", 0.0)
    if deviation == 0 and not abs(k1) > 0:
        return []
    return [f"the policy has not moved in this step, but max |ratio - 1| is {deviation:.3g} and its k1 {k1:.3g} nats"]
