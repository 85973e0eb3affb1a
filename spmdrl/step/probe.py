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
from spmdrl.types import RewardedRollout, RewardOutcome, Rollout


@torch.no_grad()
def probe_metrics(policy: Policy, probes: Sequence[Rollout], meshes: Meshes) -> Metrics:
    """Compare logprobs of the probes of all ranks, sampled with the weights that the policy has now; every rank that
    trains must call this with its own. One forward pass for each probe: together they could exceed the token budget."""
    unrewarded = RewardOutcome(reward=0.0, parts={})
    mine = to_sequences((RewardedRollout(index=0, rollout=x, outcome=unrewarded) for x in probes), meshes.training)
    sequences = [sequence for part in gather_objects(meshes.training, mine) for sequence in part]
    num_shares, multiple = meshes.data.size(), meshes.model.cp.size()
    distances = [torch.empty(0)]
    for first in range(0, len(sequences), num_shares):
        share = sequences[first : first + num_shares][meshes.data.get_local_rank() :][:1]
        batch = lay_end_to_end(share, {}, multiple=multiple)
        distances.append((policy(batch).logprobs.cpu() - batch.rollout_logprobs).abs()[batch.loss_mask])
    distance = torch.cat(distances)
    if not distance.numel() or not meshes.speaks_for_data:
        return {}
    return {
        "refit/probe_mean_abs_nats": Mean(float(distance.sum()), float(distance.numel())),
        "refit/probe_max_abs_nats": Max(float(distance.max())),
    }
