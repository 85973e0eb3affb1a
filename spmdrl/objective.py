"""What an update minimises: the pure losses of `algo`, put together as the configuration says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from spmdrl.algo.kl import kl_estimate
from spmdrl.algo.loss import clipped_policy_loss, mismatch, sft_loss, weighted_sum
from spmdrl.config import CorrectionConfig, LossConfig, MismatchConfig
from spmdrl.mismatch import mismatch_means, weigh
from spmdrl.model.policy import TokenScores
from spmdrl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of one micro-batch, and what it says about the loss tokens."""

    loss_sum: Tensor  # [] float32, with grad; summed over micro-batches and ranks it is the loss
    means: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T], to be averaged over loss tokens
    peaks: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T] >= 0, to be maximised
    worst: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T], whose greatest in size are reported
    weights: dict[str, Tensor] = field(default_factory=dict)  # [T] >= 0, whose effective sample size is reported


class ObjectiveFunction(Protocol):
    """Any loss that `update` can minimise."""

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> Objective: ...


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Weighed clipped policy loss + kl_coef KL(policy, reference) - entropy_coef entropy, per token."""

    cfg: LossConfig
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    mismatch: MismatchConfig = field(default_factory=MismatchConfig)

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> Objective:
        mask, logprobs = micro_batch.loss_mask, scores.logprobs
        policy = clipped_policy_loss(
            logprobs,
            micro_batch.old_logprobs,
            micro_batch.advantages,
            mask,
            clip_low=self.cfg.clip_low,
            clip_high=self.cfg.clip_high,
            dual_clip=self.cfg.dual_clip,
        )
        now = logprobs.detach()
        old = now if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        # What the ratio calls old may be the engine's; the mismatch is always between trainer and engine.
        trainers = now if self.correction.old == "rollout" else old
        drift = mismatch(trainers, micro_batch.rollout_logprobs, mask)
        weighed = weigh(drift.mismatch, now, micro_batch, self.correction)
        per_token = policy.per_token * weighed.weights
        means = {
            "update/clip_fraction": policy.clipped.float(),
            "update/entropy_nats": scores.entropy.detach(),
            "update/ratio": policy.ratio.detach(),
            "update/k1_old_nats": old - now,
            **mismatch_means(drift, threshold_nats=self.mismatch.threshold_nats),
            **weighed.means,
        }
        if micro_batch.ref_logprobs is not None:
            # Masked before the estimator: exp of a prompt token's difference means nothing and may overflow.
            zero = torch.zeros_like(logprobs)
            kl = kl_estimate(
                torch.where(mask, logprobs, zero),
                torch.where(mask, micro_batch.ref_logprobs, zero),
                estimator=self.cfg.kl_estimator,
            )
            per_token = per_token + self.cfg.kl_coef * kl
            means[f"update/{self.cfg.kl_estimator}_ref_nats"] = kl.detach()
        if self.cfg.entropy_coef:
            per_token = per_token - self.cfg.entropy_coef * scores.entropy
        return Objective(
            loss_sum=weighted_sum(per_token, micro_batch.loss_weights),
            means=means,
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

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> Objective:
        per_token = sft_loss(scores.logprobs, micro_batch.loss_mask)
        return Objective(
            loss_sum=weighted_sum(per_token, micro_batch.loss_weights),
            means={"update/entropy_nats": scores.entropy.detach()},
        )
