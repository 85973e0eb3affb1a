"""The mismatch floor: how far engine and trainer are apart on the same few prompts, with the same weights.

Digests say that the engine holds the trainer's numbers; this says that it computes with them what the trainer does.
What `mismatch/...` shows beyond this floor comes from stale tokens, not from kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmdrl.algo.metrics import Max, Mean, Metrics
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.mesh import Meshes
from spmdrl.model.policy import Policy
from spmdrl.step.batch import lay_end_to_end, to_sequences
from spmdrl.types import MicroBatch, RewardedRollout, RewardOutcome, Rollout


def probe_batches(probes: Sequence[Rollout], meshes: Meshes) -> list[MicroBatch]:
    """Give every rank micro-batches of the probes of all ranks; every rank that trains must call this with its own.
    Each probe has a micro-batch: together they could exceed the token budget."""
    unrewarded = RewardOutcome(reward=0.0, parts={})
    mine = to_sequences((RewardedRollout(index=0, rollout=x, outcome=unrewarded) for x in probes), meshes.training)
    sequences = [sequence for part in gather_objects(meshes.training, mine) for sequence in part]
    num_shares, multiple = meshes.data.size(), meshes.model.cp.size()
    shares = (sequences[first : first + num_shares] for first in range(0, len(sequences), num_shares))
    return [lay_end_to_end(share[meshes.data.get_local_rank() :][:1], {}, multiple=multiple) for share in shares]


@torch.no_grad()
def probe_metrics(policy: Policy, probes: Sequence[MicroBatch], meshes: Meshes) -> Metrics:
    """Compare logprobs of the probes, sampled with the weights that the policy has now; every rank that trains must
    call this with its `probe_batches`."""
    distances = [torch.empty(0)]
    for batch in probes:
        distances.append((policy(batch).logprobs.cpu() - batch.rollout_logprobs).abs()[batch.loss_mask])
    distance = torch.cat(distances)
    if not distance.numel() or not meshes.speaks_for_data:
        return {}
    return {
        "refit/probe_mean_abs_nats": Mean(float(distance.sum()), float(distance.numel())),
        "refit/probe_max_abs_nats": Max(float(distance.max())),
    }
