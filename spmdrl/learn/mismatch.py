"""The mismatch between trainer and engine: how it is measured, and compared with limits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from spmdrl.algo.loss import Mismatch
from spmdrl.algo.metrics import MAX_WORST, EffectiveFraction, TokenValue, Worst
from spmdrl.config import MismatchLimits
from spmdrl.learn.deferred import Deferred
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


def effective_fraction(weights: Tensor, loss_mask: Tensor) -> Deferred:
    """Effective sample size of weights [T] over the loss tokens; in float64, where squares of large weights fit."""
    seen = torch.where(loss_mask, weights.double(), 0.0)
    numbers = torch.stack([seen.sum(), seen.square().sum(), loss_mask.sum().double()])
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
    return Deferred(numbers, partial(_worst, micro_batch.sequence_index, micro_batch.sequence_part))


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
                sequence_part=parts[sequence] if parts else 0,
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
