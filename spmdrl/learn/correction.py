"""Corrections of the mismatch between trainer and engine, as configured; the formulas are in `algo/correction.py`.

`step/correction.py` settles everything that depends on the whole global batch before the update; what is left for a
micro-batch's forward (`weigh`) depends on its own sequences only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spmdrl.algo.aggregation import token_weights
from spmdrl.algo.correction import (
    bounded_weights,
    log_weights,
    off_policy_sequences,
    outside,
    vetoed,
    weight_sums,
)
from spmdrl.algo.segments import on_tokens, sequence_sums
from spmdrl.config import CorrectionConfig
from spmdrl.types import MicroBatch


@dataclass(frozen=True, slots=True)
class _Weighting:
    """How mismatches become weights."""

    level: str
    mode: str
    low: float
    high: float


def _weighting(correction: CorrectionConfig) -> _Weighting:
    mode = {"tis": "truncate", "icepop": "mask"}.get(correction.kind, correction.mode)
    assert mode is not None, "every kind of weights has a mode"
    high = correction.high or (5.0 if correction.kind == "icepop" else 2.0)
    low = 0.0 if mode == "truncate" else correction.low or 0.5
    return _Weighting(correction.level, mode, low, high)


@dataclass(frozen=True, slots=True)
class Weighed:
    """Factors of a micro-batch's policy loss, and metrics of them."""

    weights: Tensor  # [T] float32, no grad, factors of the per-token policy loss; 0 where a token is not trained on
    means: dict[str, Tensor]  # per-token values [T], to be averaged over loss tokens; none without a correction


def weigh(mismatch: Tensor, logprobs: Tensor, micro_batch: MicroBatch, correction: CorrectionConfig) -> Weighed:
    """Compute weights and masks from mismatches [T] and the policy's current logprobs [T]."""
    mask, cu_seqlens = micro_batch.loss_mask, micro_batch.cu_seqlens
    weights = torch.ones_like(mismatch, dtype=torch.float64)
    means: dict[str, Tensor] = {}
    if correction.kind != "none":
        how = _weighting(correction)
        raw = log_weights(mismatch, mask, cu_seqlens, level=how.level)
        weights = bounded_weights(raw, mode=how.mode, low=how.low, high=how.high) * micro_batch.mismatch_scale
        means["correction/bounded_fraction"] = outside(raw, low=how.low, high=how.high).float()
        means["correction/weight"] = weights.float()
    if correction.reject != "none" or correction.veto_below is not None:
        rejected = micro_batch.loss_weights == 0
        weights = torch.where(rejected, 0.0, weights)
        means["correction/rejected_fraction"] = rejected.float()
    if correction.opsm_delta_nats is not None:
        assert micro_batch.advantages is not None
        off_policy = off_policy_sequences(
            logprobs,
            micro_batch.rollout_logprobs,
            micro_batch.advantages,
            mask,
            cu_seqlens,
            delta_nats=correction.opsm_delta_nats,
        )
        weights = torch.where(off_policy, 0.0, weights)
        means["correction/off_policy_fraction"] = off_policy.float()
    return Weighed(weights.float(), means)


def kept_tokens(micro_batch: MicroBatch, correction: CorrectionConfig) -> Tensor:
    """[T] bool: the loss tokens that neither rejection nor veto takes out of the loss."""
    mask, cu_seqlens, mismatch = micro_batch.loss_mask, micro_batch.cu_seqlens, _old_mismatch(micro_batch)
    kept = mask
    if correction.reject != "none":
        log_weight = log_weights(mismatch, mask, cu_seqlens, level=correction.reject)
        low, high = correction.reject_low or 0.5, correction.reject_high or 2.0
        kept = kept & ~outside(log_weight, low=low, high=high)
    if correction.veto_below is not None:
        kept = kept & ~vetoed(mismatch, mask, cu_seqlens, below=correction.veto_below)
    return kept


def kept_counts(micro_batch: MicroBatch, kept: Tensor) -> Tensor:
    """[S, 2] float64: the rollout's index of each sequence, and its kept tokens. A rollout's sequences may lie in
    several micro-batches, on several ranks."""
    indices = torch.tensor(micro_batch.sequence_index, dtype=torch.float64)
    return torch.stack([indices, sequence_sums(kept.double(), micro_batch.cu_seqlens)], dim=1)


def batch_sums(micro_batch: MicroBatch, kept: Tensor, correction: CorrectionConfig) -> Tensor:
    """[2] float64, to be summed over micro-batches and ranks: the sum and the number of the kept tokens' weights, 0 and
    0 when weights are not normalised."""
    if not correction.batch_normalize:
        return torch.zeros(2, dtype=torch.float64)
    how = _weighting(correction)
    raw = log_weights(_old_mismatch(micro_batch), micro_batch.loss_mask, micro_batch.cu_seqlens, level=how.level)
    weights = bounded_weights(raw, mode=how.mode, low=how.low, high=how.high)
    return torch.stack(weight_sums(weights, kept, micro_batch.cu_seqlens, level=how.level))


def settle(
    micro_batch: MicroBatch,
    kept: Tensor,
    counts: Mapping[int, int],
    global_sums: list[float],
    *,
    aggregation: str,
    max_response_tokens: int,
) -> MicroBatch:
    """Return the micro-batch with loss weights of the kept tokens only, and with the scale of its correction weights.

    `counts` are the kept tokens of all rollouts of the mini-batch, by index, and `global_sums` its `batch_sums`.
    """
    weight_total, weight_count = global_sums
    per_sequence = token_weights(
        [counts.get(index, 0) for index in micro_batch.sequence_index],
        aggregation=aggregation,
        global_loss_tokens=sum(counts.values()),
        global_rollouts=sum(count > 0 for count in counts.values()),
        max_response_tokens=max_response_tokens,
    )
    on_each = on_tokens(torch.tensor(per_sequence), micro_batch.cu_seqlens, len(kept))
    # Where every weight is 0 there is nothing to scale.
    scale = weight_count / weight_total if weight_total else 1.0
    return replace(micro_batch, loss_weights=on_each * kept, mismatch_scale=scale)


def _old_mismatch(micro_batch: MicroBatch) -> Tensor:
    assert micro_batch.old_logprobs is not None, "a correction that looks ahead needs the pass of `add_logprobs`"
    return torch.where(micro_batch.loss_mask, micro_batch.old_logprobs - micro_batch.rollout_logprobs, 0.0)
