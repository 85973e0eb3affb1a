"""The mismatch between trainer and engine: how it is measured, and compared with limits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spmdrl.algo.loss import Mismatch
from spmdrl.algo.metrics import MAX_WORST, EffectiveFraction, TokenValue, Worst
from spmdrl.config import MismatchLimits
from spmdrl.types import MicroBatch

CONTEXT_TOKENS = 24  # of one of the worst tokens, with itself


def mismatch_means(drift: Mismatch, *, threshold_nats: float) -> dict[str, Tensor]:
    """Mismatch metrics as per-token values [T], to be averaged over the loss tokens."""
    size = drift.mismatch.abs()
    return {
        "mismatch/mean_abs_nats": size,
        "mismatch/k3_nats": drift.k3,
        "mismatch/beyond_fraction": (size > threshold_nats).float(),
    }


def effective_fraction(weights: Tensor, loss_mask: Tensor) -> EffectiveFraction:
    """Effective sample size of weights [T] over the loss tokens; in float64, where squares of large weights fit."""
    seen = torch.where(loss_mask, weights.double(), 0.0)
    total, squares, count = torch.stack([seen.sum(), seen.square().sum(), loss_mask.sum().double()]).tolist()
    return EffectiveFraction(total, squares, count)


def worst_of(values: Tensor, micro_batch: MicroBatch) -> Worst:
    """Find the loss tokens with the greatest values [T] in size; each comes with its place and the tokens before it."""
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
                sequence_part=micro_batch.sequence_part[sequence] if micro_batch.sequence_part else 0,
                position=position,
                token_ids=tuple(micro_batch.token_ids[place - min(position, CONTEXT_TOKENS - 1) : place + 1].tolist()),
                rollout_logprob=rollout_logprob,
            )
            for place, sequence, value, position, rollout_logprob in found
        )
    )


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
