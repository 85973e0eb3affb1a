"""The objective of an update: the pure losses of `algo`, put together as the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from spmdrl.algo.kl import kl_at_loss_tokens
from spmdrl.algo.loss import mismatch, sft_loss, weighted_sum
from spmdrl.algo.value import clipped_value_loss
from spmdrl.config import CorrectionConfig, LossConfig, MismatchConfig
from spmdrl.learn.coefficients import ENTROPY
from spmdrl.learn.correction import weigh
from spmdrl.learn.mismatch import mismatch_means
from spmdrl.learn.policy_loss import policy_loss_function
from spmdrl.model.policy import TokenLogprobs
from spmdrl.types import MicroBatch

DRIFT = "update/k3_old_nats"  # KL(policy that sampled || policy): how far the step's updates have moved it so far
NO_CORRECTION, USUAL_MISMATCH = CorrectionConfig(), MismatchConfig()


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of one micro-batch, with per-token values to report."""

    loss_sum: Tensor  # [] float32, with grad; summed over micro-batches and ranks it is the loss
    means: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T], to be averaged over loss tokens
    peaks: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T] >= 0, to be maximised
    worst: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T]; the greatest in size are reported
    weights: dict[str, Tensor] = field(default_factory=dict)  # [T] >= 0, whose effective sample size is reported
    # Per-token values [T], to be averaged over other tokens than the loss tokens: those where the second is True, [T].
    elsewhere: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class ObjectiveFunction(Protocol):
    """Any loss that `update` can minimise."""

    def __call__(self, outputs: Any, micro_batch: MicroBatch, /) -> Objective:
        """Compute the objective from what the model's forward returned for the micro-batch."""
        ...


class PolicyObjective:
    """Corrected policy loss + kl_coef KL(policy || reference) - entropy_coef entropy, per loss token; and the cross
    entropy of what environments said, where that has weights."""

    def __init__(
        self,
        loss: LossConfig,
        coefficients: Mapping[str, float] = MappingProxyType({}),
        correction: CorrectionConfig = NO_CORRECTION,
        mismatch: MismatchConfig = USUAL_MISMATCH,
    ) -> None:
        """`coefficients` are those of `coefficients.py`, which may change from step to step."""
        self._loss, self._coefficients, self._correction, self._mismatch = loss, coefficients, correction, mismatch
        self._policy_loss = policy_loss_function(loss)

    def __call__(self, outputs: TokenLogprobs, micro_batch: MicroBatch) -> Objective:
        mask, logprobs = micro_batch.loss_mask, outputs.logprobs
        policy = self._policy_loss(logprobs, outputs.entropy, micro_batch)
        now = logprobs.detach()
        old = now if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        # What the ratio calls old may be the engine's; the mismatch is always between trainer and engine.
        trainers = now if self._correction.old == "rollout" else old
        drift = mismatch(trainers, micro_batch.rollout_logprobs, mask)
        weighed = weigh(drift.mismatch, now, micro_batch, self._correction)
        per_token = policy.per_token * weighed.weights
        means = {
            "update/clip_fraction": policy.clipped.float(),
            "update/entropy_nats": outputs.entropy.detach(),
            "update/ratio": policy.ratio.detach(),
            "update/k1_old_nats": old - now,
            DRIFT: kl_at_loss_tokens(old, now, mask, estimator="k3"),
            **mismatch_means(drift, threshold_nats=self._mismatch.threshold_nats),
            **weighed.means,
            **{f"loss/{name}": values for name, values in policy.means.items()},
        }
        if micro_batch.ref_logprobs is not None:
            kl = kl_at_loss_tokens(logprobs, micro_batch.ref_logprobs, mask, estimator=self._loss.kl_estimator)
            if self._loss.kl_coef:  # else the reference is the reward's
                per_token = per_token + self._loss.kl_coef * kl
            means[f"update/{self._loss.kl_estimator}_ref_nats"] = kl.detach()
        if entropy_coef := self._coefficients.get(ENTROPY, self._loss.entropy_coef):
            per_token = per_token - entropy_coef * outputs.entropy
        loss_sum, elsewhere = weighted_sum(per_token, micro_batch.loss_weights), {}
        if (weights := micro_batch.environment_weights) is not None:
            said = weights != 0
            cross_entropy = sft_loss(logprobs, said)
            loss_sum = loss_sum + weighted_sum(cross_entropy, weights)
            elsewhere["loss/environment_nats"] = cross_entropy.detach(), said
        return Objective(
            loss_sum=loss_sum,
            means=means,
            elsewhere=elsewhere,
            peaks={"update/ratio_max_deviation": (policy.ratio.detach() - 1).abs()},
            worst={"mismatch/max_abs_nats": drift.mismatch},
            weights={
                "mismatch/effective_fraction": drift.mismatch.double().exp(),
                **({"correction/effective_fraction": weighed.weights} if weighed.means else {}),
            },
        )


@dataclass(frozen=True, slots=True)
class SftObjective:
    """Cross-entropy of the responses."""

    def __call__(self, outputs: TokenLogprobs, micro_batch: MicroBatch) -> Objective:
        per_token = sft_loss(outputs.logprobs, micro_batch.loss_mask)
        return Objective(
            loss_sum=weighted_sum(per_token, micro_batch.loss_weights),
            means={"update/entropy_nats": outputs.entropy.detach()},
        )


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Half the squared error of a critic's values, clipped."""

    clip_value: float  # in units of the reward

    def __call__(self, values: Tensor, micro_batch: MicroBatch) -> Objective:
        old, returns = micro_batch.values, micro_batch.returns
        assert old is not None and returns is not None, "the batch has not been through add_advantages"
        loss = clipped_value_loss(values, old, returns, micro_batch.loss_mask, clip_value=self.clip_value)
        return Objective(
            loss_sum=weighted_sum(loss.per_token, micro_batch.loss_weights),
            means={"critic/clip_fraction": loss.clipped.float()},
        )
