"""Corrections that depend on the global batch: see `learn/correction.py`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.losses import covariances, highest, num_selected, selected_tokens
from spmdrl.algo.seeds import mix
from spmdrl.algo.sequences import on_tokens
from spmdrl.config import Algorithm, Config, LossConfig
from spmdrl.config.plan import needs_global_stats
from spmdrl.dist.collectives import gather_rows, sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.correction import accepted_counts, accepted_tokens, apply_rejection, batch_sums
from spmdrl.step.batch import Batch
from spmdrl.types import MicroBatch, MiniBatch

# The tokens that `clip_cov` and `kl_cov` treat apart, selected over whole mini-batches: see `algo/losses.py`.


def select_by_covariance(batch: Batch, losses: Sequence[LossConfig], meshes: Meshes, *, seed: int) -> Batch:
    """Add `cov_selected`, where one of the losses, one for each algorithm, has a use for it. Every rank that trains
    must call this.

    Tokens that a correction has rejected are neither counted nor selected. With the step's `seed` the same tokens are
    selected however the step is cut into micro-batches.
    """
    for place, cfg in enumerate(losses):
        if not cfg.cov_selection:
            continue
        selected = [
            _selection([one.owned_by(place) for one in mini_batch], cfg, meshes.data, seed=mix(seed, number))
            if mini_batch
            else []
            for number, mini_batch in enumerate(batch.mini_batches)
        ]
        both = zip(batch.micro_batches, itertools.chain.from_iterable(selected), strict=True)
        batch = batch.with_micro_batches(
            one.with_columns({"cov_selected": column if one.cov_selected is None else one.cov_selected | column})
            for one, column in both
        )
    return batch


def _selection(mini_batch: MiniBatch, cfg: LossConfig, mesh: DeviceMesh, *, seed: int) -> list[Tensor]:
    """Select among a mini-batch's tokens: [T] bool of each micro-batch."""
    assert cfg.formula is not None and cfg.formula.prioritise is not None
    settings = cfg.cov_selection
    fraction = settings.pop("cov_fraction")
    columns = [_counted_columns(micro_batch, seed) for micro_batch in mini_batch]
    logprobs, advantages, seeds, positions = (torch.cat(column) for column in zip(*columns, strict=True))
    sums = torch.stack([logprobs.sum(), advantages.sum(), logprobs.new_tensor(len(logprobs))])
    logprob, advantage, num_tokens = sum_over(mesh, sums).tolist()
    covariance = covariances(
        logprobs,
        advantages,
        mean_logprob=logprob / max(1.0, num_tokens),
        mean_advantage=advantage / max(1.0, num_tokens),
    )
    priorities = cfg.formula.prioritise(covariance, seeds, positions, **settings)
    count = num_selected(int(num_tokens), fraction)
    candidates = torch.cat(gather_rows(mesh, highest(priorities, count)[:, None])).flatten()
    selected = selected_tokens(priorities, float(highest(candidates, count)[-1])) if count else priorities > 0
    masks = [_counted(micro_batch) for micro_batch in mini_batch]
    parts = selected.split([int(mask.sum()) for mask in masks])
    return [torch.zeros_like(mask).masked_scatter(mask, part) for mask, part in zip(masks, parts, strict=True)]


def _counted(micro_batch: MicroBatch) -> Tensor:
    """[T] bool: the loss tokens that no correction has rejected."""
    return micro_batch.loss_mask & (micro_batch.loss_weights != 0)


def _counted_columns(micro_batch: MicroBatch, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """old_logprobs, advantages (both float64), the sequence's seed and the place in it, of the tokens that count."""
    assert micro_batch.old_logprobs is not None, "covariances are those of the policy before its update"
    assert micro_batch.advantages is not None, "covariances are those of log-probabilities and advantages"
    counted = _counted(micro_batch)
    of_sequence = torch.tensor([mix(seed, index + (segment << 32)) for index, segment in micro_batch.places])
    seeds = on_tokens(of_sequence, micro_batch.cu_seqlens, len(micro_batch.token_ids))
    return (
        micro_batch.old_logprobs.double()[counted],
        micro_batch.advantages.double()[counted],
        seeds[counted],
        micro_batch.positions[counted],
    )


def correct(batch: Batch, cfg: Config, meshes: Meshes) -> Batch:
    """Take rejected tokens out of the loss and its denominator, and scale weights to the mean 1, over the global batch.

    Every rank that trains must call this. Each mini-batch is a global batch of its own, as it is for the loss, and so
    are in it the sequences of each algorithm. A batch whose corrections need single sequences only is returned as it
    is.
    """
    for place, algorithm in enumerate(cfg.algorithms):
        if needs_global_stats(algorithm.correction):
            longest = cfg.rollout.max_response_tokens
            corrected = _corrected(batch, place, algorithm, meshes.data, max_response_tokens=longest)
            batch = batch.with_micro_batches(map(_joined, batch.micro_batches, corrected))
    return batch


def _joined(micro_batch: MicroBatch, corrected: MicroBatch) -> MicroBatch:
    """Return the micro-batch with what was corrected for the loss tokens of one algorithm."""
    scale = torch.ones_like(corrected.rewards) if micro_batch.mismatch_scale is None else micro_batch.mismatch_scale
    before = {"loss_weights": micro_batch.loss_weights, "mismatch_scale": scale}
    own = corrected.loss_mask
    columns = corrected.columns
    return micro_batch.with_columns({name: torch.where(own, columns[name], x) for name, x in before.items()})


def _corrected(
    batch: Batch, place: int, algorithm: Algorithm, mesh: DeviceMesh, *, max_response_tokens: int
) -> Iterator[MicroBatch]:
    """Yield the micro-batches as the algorithm sees them, corrected."""
    correction = algorithm.correction
    seen = [[one.owned_by(place) for one in mini_batch] for mini_batch in batch.mini_batches]
    accepted = [[accepted_tokens(micro_batch, correction) for micro_batch in mini_batch] for mini_batch in seen]
    pairs = [list(zip(*both, strict=True)) for both in zip(seen, accepted, strict=True)]
    local = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for sums, of_mini_batch in zip(local, pairs, strict=True):
        for micro_batch, mask in of_mini_batch:
            sums += batch_sums(micro_batch, mask, correction)
    counts = _counts_by_rollout(pairs, mesh)
    for of_rollouts, global_sums, of_mini_batch in zip(counts, sum_over(mesh, local).tolist(), pairs, strict=True):
        for micro_batch, mask in of_mini_batch:
            yield apply_rejection(
                micro_batch,
                mask,
                of_rollouts,
                global_sums,
                aggregation=algorithm.loss.aggregation,
                max_response_tokens=max_response_tokens,
                weight=algorithm.weight,
            )


def _counts_by_rollout(pairs: list[list[tuple[MicroBatch, Tensor]]], mesh: DeviceMesh) -> list[Counter[int]]:
    """The accepted tokens of each mini-batch's rollouts, of all ranks, by index."""
    mine = [torch.empty(0, 3, dtype=torch.float64)]
    for number, of_mini_batch in enumerate(pairs):
        mine += [F.pad(accepted_counts(micro_batch, mask), (1, 0), value=number) for micro_batch, mask in of_mini_batch]
    counts: list[Counter[int]] = [Counter() for _ in pairs]
    for number, index, count in torch.cat(gather_rows(mesh, torch.cat(mine))).long().tolist():
        counts[number][index] += count  # filling has none
    return counts
