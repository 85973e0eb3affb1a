"""Corrections that depend on the global batch: see `learn/correction.py`."""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config
from spmdrl.config.plan import looks_ahead
from spmdrl.dist.collectives import gather_rows, sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.correction import batch_sums, kept_counts, kept_tokens, settle
from spmdrl.step.batch import Batch
from spmdrl.types import MicroBatch


def correct(batch: Batch, cfg: Config, meshes: Meshes) -> Batch:
    """Take rejected tokens out of the loss and its denominator, and scale weights to the mean 1, over the global batch.

    Every rank that trains must call this. Each mini-batch is a global batch of its own, as it is for the loss. A batch
    whose correction looks at single sequences only is returned as it is.
    """
    correction = cfg.correction
    if not looks_ahead(correction):
        return batch
    kept = [[kept_tokens(micro_batch, correction) for micro_batch in mini_batch] for mini_batch in batch.mini_batches]
    pairs = [list(zip(*both, strict=True)) for both in zip(batch.mini_batches, kept, strict=True)]
    local = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for sums, of_mini_batch in zip(local, pairs, strict=True):
        for micro_batch, mask in of_mini_batch:
            sums += batch_sums(micro_batch, mask, correction)
    counts = _counts_by_rollout(pairs, meshes.data)
    return batch.with_micro_batches(
        settle(
            micro_batch,
            mask,
            of_rollouts,
            global_sums,
            aggregation=cfg.loss.aggregation,
            max_response_tokens=cfg.rollout.max_response_tokens,
        )
        for of_rollouts, global_sums, of_mini_batch in zip(
            counts, sum_over(meshes.data, local).tolist(), pairs, strict=True
        )
        for micro_batch, mask in of_mini_batch
    )


def _counts_by_rollout(pairs: list[list[tuple[MicroBatch, Tensor]]], mesh: DeviceMesh) -> list[Counter[int]]:
    """The kept tokens of each mini-batch's rollouts, of all ranks, by index."""
    mine = [torch.empty(0, 3, dtype=torch.float64)]
    for number, of_mini_batch in enumerate(pairs):
        mine += [F.pad(kept_counts(micro_batch, mask), (1, 0), value=number) for micro_batch, mask in of_mini_batch]
    counts: list[Counter[int]] = [Counter() for _ in pairs]
    for number, index, count in torch.cat(gather_rows(mesh, torch.cat(mine))).long().tolist():
        counts[number][index] += count  # filling has none
    return counts
