"""What an update minimises: the pure losses of `algo`, put together as the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from spmdrl.algo.kl import kl_at_loss_tokens
from spmdrl.algo.loss import mismatch, sft_loss, weighted_sum
from spmdrl.coefficients import ENTROPY
from spmdrl.config import LossConfig
from spmdrl.model.policy import TokenScores
from spmdrl.policy_loss import policy_loss_function
from spmdrl.types import MicroBatch

DRIFT = "update/k3_old_nats"  # KL(policy that sampled || policy): how far a step's updates have gone so far


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of one micro-batch, and what it says about the loss tokens."""

    loss_sum: Tensor  # [] float32, with grad; summed over micro-batches and ranks it is the loss
    means: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T], to be averaged over loss tokens
    peaks: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T] >= 0, to be maximised


class ObjectiveFunction(Protocol):
    """Any loss that `update` can minimise."""

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> Objective: ...


class PolicyObjective:
    """Policy loss + kl_coef KL(policy, reference) - entropy_coef entropy, per token."""

    def __init__(self, cfg: LossConfig, coefficients: Mapping[str, float] = MappingProxyType({})) -> None:
        """`coefficients`: those of `coefficients.py`, which may change from step to step."""
        self._cfg, self._coefficients = cfg, coefficients
        self._policy_loss = policy_loss_function(cfg)

    def __call__(self, scores: TokenScores, micro_batch: MicroBatch) -> Objective:
        mask, logprobs = micro_batch.loss_mask, scores.logprobs
        policy = self._policy_loss(logprobs, micro_batch)
        per_token = policy.per_token
        old = logprobs.detach() if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        drift = mismatch(old, micro_batch.rollout_logprobs, mask)
        means = {
            "update/clip_fraction": policy.clipped.float(),
            "update/entropy_nats": scores.entropy.detach(),
            "update/ratio": policy.ratio.detach(),
            "mismatch/mean_abs_nats": drift.mismatch.abs(),
            "mismatch/k3_nats": drift.k3,
            DRIFT: kl_at_loss_tokens(old, logprobs.detach(), mask, estimator="k3"),
        }
        if micro_batch.ref_logprobs is not None:
            kl = kl_at_loss_tokens(logprobs, micro_batch.ref_logprobs, mask, estimator=self._cfg.kl_estimator)
            if self._cfg.kl_coef:  # else the reference is the reward's
                per_token = per_token + self._cfg.kl_coef * kl
            means[f"update/{self._cfg.kl_estimator}_ref_nats"] = kl.detach()
        if entropy_coef := self._coefficients.get(ENTROPY, self._cfg.entropy_coef):
            per_token = per_token - entropy_coef * scores.entropy
        return Objective(
            loss_sum=weighted_sum(per_token, micro_batch.loss_weights),
            means=means,
            peaks={
                "mismatch/max_abs_nats": drift.mismatch.abs(),
                "update/ratio_max_deviation": (policy.ratio.detach() - 1).abs(),
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
