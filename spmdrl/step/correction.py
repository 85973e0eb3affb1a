"""Corrections that depend on the global batch: see `learn/correction.py`."""

from __future__ import annotations

import torch

from spmdrl.config import Config
from spmdrl.config.plan import looks_ahead
from spmdrl.dist.collectives import sum_over
from spmdrl.dist.mesh import Meshes
from spmdrl.learn.correction import batch_sums, kept_tokens, settle
from spmdrl.step.batch import Batch


def correct(batch: Batch, cfg: Config, meshes: Meshes) -> Batch:
    """Take rejected tokens out of the loss and its denominator, and scale weights to the mean 1, over the global batch.

    Every rank that trains must call this. Each mini-batch is a global batch of its own, as it is for the loss. A batch
    whose correction looks at single sequences only is returned as it is.
    """
    correction = cfg.correction
    if not looks_ahead(correction):
        return batch
    local = torch.zeros(len(batch.mini_batches), 4, dtype=torch.float64)
    for sums, mini_batch in zip(local, batch.mini_batches, strict=True):
        for micro_batch in mini_batch:
            sums += batch_sums(micro_batch, kept_tokens(micro_batch, correction), correction)
    return batch.with_micro_batches(
        settle(
            micro_batch,
            kept_tokens(micro_batch, correction),
            global_sums,
            aggregation=cfg.loss.aggregation,
            max_response_tokens=cfg.rollout.max_response_tokens,
        )
        for global_sums, mini_batch in zip(sum_over(meshes.data, local).tolist(), batch.mini_batches, strict=True)
        for micro_batch in mini_batch
    )
