"""Where trainer and engine disagree: measured, corrected as the configuration says, and compared with limits.

The formulas are in `algo/correction.py`. Everything that depends on the whole global batch is settled by `correct`
before the update; what is left for a micro-batch's forward depends on its own sequences only.
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
from spmdrl.algo.loss import Mismatch
from spmdrl.algo.metrics import MAX_WORST, EffectiveFraction, TokenValue, Worst
from spmdrl.algo.segments import on_tokens, sequence_sums
from spmdrl.config import CorrectionConfig, MismatchLimits
from spmdrl.config.plan import Plan, looks_ahead
from spmdrl.dist.collectives import sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.step.batch import MiniBatch
from spmdrl.types import MicroBatch

CONTEXT_TOKENS = 24  # of one of the worst tokens, with itself


@dataclass(frozen=True, slots=True)
class _Weighting:
    """The weights that a configuration asks for."""

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
    """What a correction does to the policy loss of a micro-batch; without one, no `means`."""

    weights: Tensor  # [T] float32, no grad, factors of the per-token policy loss; 0 where a token does not teach
    means: dict[str, Tensor]  # per-token values [T], to be averaged over loss tokens


def weigh(mismatch: Tensor, logprobs: Tensor, micro_batch: MicroBatch, correction: CorrectionConfig) -> Weighed:
    """Weights and masks for these mismatches [T]; logprobs [T] are the policy's now."""
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


def correct(
    mini_batches: list[MiniBatch], correction: CorrectionConfig, plan: Plan, meshes: Meshes, *, aggregation: str
) -> list[MiniBatch]:
    """Settle what depends on the global batch: rejected tokens leave it, and weights get the mean 1 in it.

    Every rank that trains must call this. Each mini-batch is a global batch of its own, as it is for the loss. Where
    nothing looks ahead, the mini-batches are returned as they are.
    """
    if not looks_ahead(correction):
        return mini_batches
    kept = [[kept_tokens(m, correction) for m in mini_batch] for mini_batch in mini_batches]
    local = torch.zeros(len(mini_batches), 4, dtype=torch.float64)
    for totals, mini_batch, masks in zip(local, mini_batches, kept, strict=True):
        for micro_batch, mask in zip(mini_batch, masks, strict=True):
            totals += batch_sums(micro_batch, mask, correction)
    global_sums = sum_over(meshes.data, local).tolist()
    return [
        [
            settle(m, mask, sums, aggregation=aggregation, max_response_tokens=plan.max_response_tokens)
            for m, mask in zip(mini_batch, masks, strict=True)
        ]
        for mini_batch, masks, sums in zip(mini_batches, kept, global_sums, strict=True)
    ]


def kept_tokens(micro_batch: MicroBatch, correction: CorrectionConfig) -> Tensor:
    """[T] bool: the loss tokens that neither rejection nor veto takes out."""
    mask, cu_seqlens, mismatch = micro_batch.loss_mask, micro_batch.cu_seqlens, _old_mismatch(micro_batch)
    kept = mask
    if correction.reject != "none":
        log_weight = log_weights(mismatch, mask, cu_seqlens, level=correction.reject)
        low, high = correction.reject_low or 0.5, correction.reject_high or 2.0
        kept = kept & ~outside(log_weight, low=low, high=high)
    if correction.veto_below is not None:
        kept = kept & ~vetoed(mismatch, mask, cu_seqlens, below=correction.veto_below)
    return kept


def batch_sums(micro_batch: MicroBatch, kept: Tensor, correction: CorrectionConfig) -> Tensor:
    """[4] float64, to be summed over micro-batches and ranks: kept tokens, sequences that have any, and the sum and the
    number of their weights, 0 and 0 when weights are not normalised."""
    counts = sequence_sums(kept.double(), micro_batch.cu_seqlens)
    sums = [counts.sum(), (counts > 0).sum().double()]
    if not correction.batch_normalize:
        return torch.stack([*sums, *torch.zeros(2, dtype=torch.float64)])
    how = _weighting(correction)
    raw = log_weights(_old_mismatch(micro_batch), micro_batch.loss_mask, micro_batch.cu_seqlens, level=how.level)
    weights = bounded_weights(raw, mode=how.mode, low=how.low, high=how.high)
    return torch.stack([*sums, *weight_sums(weights, kept, micro_batch.cu_seqlens, level=how.level)])


def settle(
    micro_batch: MicroBatch, kept: Tensor, global_sums: list[float], *, aggregation: str, max_response_tokens: int
) -> MicroBatch:
    """The micro-batch with the denominators of what is kept and the scale of its weights, for `batch_sums` of all."""
    num_tokens, num_sequences, weight_total, weight_count = global_sums
    counts = sequence_sums(kept.double(), micro_batch.cu_seqlens)
    per_sequence = token_weights(
        [int(count) for count in counts.tolist()],
        aggregation=aggregation,
        global_loss_tokens=int(num_tokens),
        global_sequences=int(num_sequences),
        max_response_tokens=max_response_tokens,
    )
    on_each = on_tokens(torch.tensor(per_sequence), micro_batch.cu_seqlens, len(kept))
    # Where every weight is 0 there is nothing to scale.
    scale = weight_count / weight_total if weight_total else 1.0
    return replace(micro_batch, loss_weights=on_each * kept, mismatch_scale=scale)


def _old_mismatch(micro_batch: MicroBatch) -> Tensor:
    assert micro_batch.old_logprobs is not None, "a correction that looks ahead needs the pass of `add_logprobs`"
    return torch.where(micro_batch.loss_mask, micro_batch.old_logprobs - micro_batch.rollout_logprobs, 0.0)


def mismatch_means(drift: Mismatch, *, threshold_nats: float) -> dict[str, Tensor]:
    """Per-token values [T] that are averaged over the loss tokens."""
    size = drift.mismatch.abs()
    return {
        "mismatch/mean_abs_nats": size,
        "mismatch/k3_nats": drift.k3,
        "mismatch/beyond_fraction": (size > threshold_nats).float(),
    }


def effective_fraction(weights: Tensor, loss_mask: Tensor) -> EffectiveFraction:
    """Of weights [T], over the loss tokens; in float64, in which squares of large weights still fit."""
    seen = torch.where(loss_mask, weights.double(), 0.0)
    total, squares, count = torch.stack([seen.sum(), seen.square().sum(), loss_mask.sum().double()]).tolist()
    return EffectiveFraction(total, squares, count)


def worst_of(values: Tensor, micro_batch: MicroBatch) -> Worst:
    """The loss tokens with the greatest values [T] in size, each with its place and the tokens before it."""
    size = torch.where(micro_batch.loss_mask, values.abs(), 0.0)
    places = size.topk(min(MAX_WORST, len(size))).indices
    places = places[size[places] != 0]
    sequences = torch.searchsorted(micro_batch.cu_seqlens.long(), places, right=True) - 1
    found = zip(
        places.tolist(),
        sequences.tolist(),
        values[places].tolist(),
        micro_batch.positions[places].tolist(),
        micro_batch.rollout_logprobs[places].tolist(),
        strict=True,
    )
    return Worst(
        tuple(
            TokenValue(
                value=value,
                sequence_index=micro_batch.sequence_index[sequence] if micro_batch.sequence_index else sequence,
                position=position,
                token_ids=tuple(micro_batch.token_ids[place - min(position, CONTEXT_TOKENS - 1) : place + 1].tolist()),
                rollout_logprob=rollout_logprob,
            )
            for place, sequence, value, position, rollout_logprob in found
        )
    )


def exceeded(values: Mapping[str, float], limits: MismatchLimits) -> list[str]:
    """A clause for each limit that these metrics are beyond."""
    found = []
    for name, limit in limits:
        metric, lowest = f"mismatch/{name}", name == "effective_fraction"
        if limit is None or metric not in values:
            continue
        value = values[metric]
        if value < limit if lowest else value > limit:
            found.append(f"{metric} is {value:.3g}, {'below' if lowest else 'above'} {limit:g}")
    return found
