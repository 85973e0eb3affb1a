"""Batches as a loss takes them, without the phases that make them so."""

from __future__ import annotations

from spmdrl.dist.mesh import Meshes
from spmdrl.model.policy import Policy
from spmdrl.step.batch import Batch
from spmdrl.step.logprobs import Forward, add_columns


def completed(batch: Batch, meshes: Meshes, policy: Policy | None = None, reference: Policy | None = None) -> Batch:
    """The batch with its rewards for advantages, and with the log-probabilities of the models that are given."""
    forwards: dict[str, Forward] = {"advantages": lambda micro_batch: micro_batch.rewards.float()}
    if policy is not None and len(batch.mini_batches) > 1:
        forwards["old_logprobs"] = lambda micro_batch: policy(micro_batch).logprobs
    if reference is not None:
        forwards["ref_logprobs"] = lambda micro_batch: reference(micro_batch).logprobs
    return add_columns(batch, forwards, meshes.training)
