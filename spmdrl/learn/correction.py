"""Corrections of the mismatch between trainer and engine, as configured; the formulas are in `algo/correction.py`.

`step/correction.py` settles everything that depends on the whole global batch before the update; what is left for a
micro-batch's forward (`importance_weights`) depends on its own sequences only.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from spmdrl.algo.correction import bounded_weights, log_weights, off_policy_sequences, outside, vetoed, weight_sums
from spmdrl.algo.losses import Mismatch, token_weights
from spmdrl.algo.metrics import MAX_WORST, Deferred, EffectiveFraction, TokenValue, Worst
from spmdrl.algo.sequences import on_tokens, sequence_sums
from spmdrl.config import CorrectionConfig, MismatchLimits
from spmdrl.types import MicroBatch

# The mismatch between trainer and engine: how it is measured, and compared with limits.


CONTEXT_TOKENS = 24  # of one of the worst tokens, with itself
_DEPTHS = (0, 1024, 8192, 65536)


def mismatch_means(drift: Mismatch, *, threshold_nats: float) -> dict[str, Tensor]:
    """Mismatch metrics as per-token values [T], to be averaged over the loss tokens."""
    size = drift.mismatch.abs()
    return {
        "mismatch/mean_abs_nats": size,
        "mismatch/k3_nats": drift.k3,
        "mismatch/beyond_fraction": (size > threshold_nats).float(),
    }


def depths_of(longest_tokens: int) -> list[int]:
    """List the places at which a new range of depths begins, in sequences of up to so long; none of short ones."""
    depths = [depth for depth in _DEPTHS if depth < longest_tokens]
    return depths if len(depths) > 1 else []


def mismatch_by_depth(drift: Mismatch, micro_batch: MicroBatch, depths: list[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Mismatches [T] of the loss tokens in each range of depths, and where those are [T]: an engine that computes long
    contexts otherwise is found in the last."""
    if not depths:
        return {}
    size, place = drift.mismatch.abs(), micro_batch.positions
    return {
        f"mismatch/mean_abs_nats_from_{start}": (size, micro_batch.loss_mask & (place >= start) & (place < end))
        for start, end in itertools.pairwise([*depths, sys.maxsize])
    }


def effective_fraction(weights: Tensor, where: Tensor) -> Deferred:
    """Effective sample size of weights [T] over some tokens, [T] bool; in float64, where squares of large ones fit."""
    seen = torch.where(where, weights.double(), 0.0)
    numbers = torch.stack([seen.sum(), seen.square().sum(), where.sum().double()])
    return Deferred(numbers, lambda found: EffectiveFraction(*found))


def worst_of(values: Tensor, micro_batch: MicroBatch) -> Deferred:
    """Find the loss tokens with the greatest values [T] in size; each comes with its place and the tokens before it."""
    size = torch.where(micro_batch.loss_mask, values.abs(), 0.0)
    size, places = size.topk(min(MAX_WORST, len(size)))
    sequences = torch.searchsorted(micro_batch.cu_seqlens.long(), places, right=True) - 1
    before = torch.arange(1 - CONTEXT_TOKENS, 1, device=places.device)
    # Tokens of other sequences among them are left out on the host.
    context = micro_batch.token_ids[(places[:, None] + before).clamp_min(0)]
    columns = [size, values[places], sequences, micro_batch.positions[places], micro_batch.rollout_logprobs[places]]
    numbers = torch.cat([torch.stack([column.double() for column in columns], 1), context.double()], 1)
    # Not the micro-batch, whose tensors and images would stay on the device until the metrics are fetched.
    return Deferred(numbers, partial(_worst, micro_batch.sequence_index, micro_batch.sequence_segment))


def _worst(indices: tuple[int, ...], parts: tuple[int, ...], numbers: list[float]) -> Worst:
    """Make the metric from rows of a token's size, value, sequence, position, log-probability and context."""
    width, tokens = 5 + CONTEXT_TOKENS, []
    for start in range(0, len(numbers), width):
        size, value, sequence_number, place, rollout_logprob, *context = numbers[start : start + width]
        if size == 0:
            continue
        sequence, position = int(sequence_number), int(place)
        tokens.append(
            TokenValue(
                value=value,
                sequence_index=indices[sequence] if indices else sequence,
                sequence_segment=parts[sequence] if parts else 0,
                position=position,
                token_ids=tuple(int(token) for token in context[-1 - min(position, CONTEXT_TOKENS - 1) :]),
                rollout_logprob=rollout_logprob,
            )
        )
    return Worst(tuple(tokens))


def exceeded(values: Mapping[str, float], limits: MismatchLimits) -> list[str]:
    """List a clause for each limit that these metrics exceed."""
    found = []
    for name, limit in limits:
        metric, lowest = f"mismatch/{name}", name == "effective_fraction"
        if limit is None or metric not in values:
            continue
        value = values[metric]
        if value < limit if lowest else value > limit:
            found.append(f"{metric} is {value:.3g}, {'below' if lowest else 'above'} {limit:g}")
    return found


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
class ImportanceWeights:
    """Factors of a micro-batch's policy loss, and metrics of them."""

    weights: Tensor  # [T] float32, no grad, factors of the per-token policy loss; 0 where a token is not trained on
    means: dict[str, Tensor]  # per-token values [T], to be averaged over loss tokens; none without a correction


def importance_weights(
    mismatch: Tensor, logprobs: Tensor, micro_batch: MicroBatch, correction: CorrectionConfig
) -> ImportanceWeights:
    """Compute weights and masks from mismatches [T] and the policy's current logprobs [T]."""
    mask, cu_seqlens = micro_batch.loss_mask, micro_batch.cu_seqlens
    weights = torch.ones_like(mismatch, dtype=torch.float64)
    means: dict[str, Tensor] = {}
    if correction.kind != "none":
        how = _weighting(correction)
        raw = log_weights(mismatch, mask, cu_seqlens, level=how.level)
        weights = bounded_weights(raw, mode=how.mode, low=how.low, high=how.high)
        if micro_batch.mismatch_scale is not None:
            weights = weights * micro_batch.mismatch_scale
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
    return ImportanceWeights(weights.float(), means)


def accepted_tokens(micro_batch: MicroBatch, correction: CorrectionConfig) -> Tensor:
    """[T] bool: the loss tokens that neither rejection nor veto takes out of the loss."""
    mask, cu_seqlens, mismatch = micro_batch.loss_mask, micro_batch.cu_seqlens, _old_mismatch(micro_batch)
    accepted = mask
    if correction.reject != "none":
        log_weight = log_weights(mismatch, mask, cu_seqlens, level=correction.reject)
        low, high = correction.reject_low or 0.5, correction.reject_high or 2.0
        accepted = accepted & ~outside(log_weight, low=low, high=high)
    if correction.veto_below is not None:
        accepted = accepted & ~vetoed(mismatch, mask, cu_seqlens, below=correction.veto_below)
    return accepted


def accepted_counts(micro_batch: MicroBatch, accepted: Tensor) -> Tensor:
    """[S, 2] float64: the rollout's index of each sequence, and its accepted tokens. A rollout's sequences may lie in
    several micro-batches, on several ranks."""
    indices = torch.tensor(micro_batch.sequence_index, dtype=torch.float64)
    return torch.stack([indices, sequence_sums(accepted.double(), micro_batch.cu_seqlens)], dim=1)


def batch_sums(micro_batch: MicroBatch, accepted: Tensor, correction: CorrectionConfig) -> Tensor:
    """[2] float64, to be summed over micro-batches and ranks: the sum and the number of the accepted tokens' weights;
    0 and 0 when weights are not normalised."""
    if not correction.batch_normalize:
        return torch.zeros(2, dtype=torch.float64)
    how = _weighting(correction)
    raw = log_weights(_old_mismatch(micro_batch), micro_batch.loss_mask, micro_batch.cu_seqlens, level=how.level)
    weights = bounded_weights(raw, mode=how.mode, low=how.low, high=how.high)
    return torch.stack(weight_sums(weights, accepted, micro_batch.cu_seqlens, level=how.level))


def apply_rejection(
    micro_batch: MicroBatch,
    accepted: Tensor,
    counts: Mapping[int, int],
    global_sums: list[float],
    *,
    aggregation: str,
    max_response_tokens: int,
    weight: float = 1.0,
) -> MicroBatch:
    """Return the micro-batch with loss weights of the accepted tokens only, `weight` times those of the aggregation,
    and with the scale of its correction weights.

    `counts` are the accepted tokens of all rollouts of the mini-batch, by index, and `global_sums` its `batch_sums`.
    """
    weight_total, weight_count = global_sums
    per_sequence = token_weights(
        [counts.get(index, 0) for index in micro_batch.sequence_index],
        aggregation=aggregation,
        global_loss_tokens=sum(counts.values()),
        global_rollouts=sum(count > 0 for count in counts.values()),
        max_response_tokens=max_response_tokens,
    )
    on_each = on_tokens(torch.tensor(per_sequence), micro_batch.cu_seqlens, len(accepted))
    # Where every weight is 0 there is nothing to scale.
    scale = weight_count / weight_total if weight_total else 1.0
    scales = torch.full_like(on_each, scale, dtype=torch.float64)
    return replace(micro_batch, loss_weights=weight * on_each * accepted, mismatch_scale=scales)


def _old_mismatch(micro_batch: MicroBatch) -> Tensor:
    assert micro_batch.old_logprobs is not None, "a correction that looks ahead needs the pass of `add_logprobs`"
    return torch.where(micro_batch.loss_mask, micro_batch.old_logprobs - micro_batch.rollout_logprobs, 0.0)
