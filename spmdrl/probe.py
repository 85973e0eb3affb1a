"""The mismatch floor: how far engine and trainer are apart on the same few prompts, with the same weights.

Digests say that the engine holds the trainer's numbers; this says that it computes with them what the trainer does.
What `mismatch/...` shows beyond this floor comes from stale tokens, not from kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.batch import lay_end_to_end, to_sequence
from spmdrl.dist.collectives import failing_together, gather_objects
from spmdrl.metrics import Max, Mean, Metrics
from spmdrl.model.policy import Policy
from spmdrl.types import RewardOutcome, Rollout, ScoredRollout


@torch.no_grad()
def probe_metrics(policy: Policy, probes: Sequence[Rollout], mesh: DeviceMesh) -> Metrics:
    """Score this rank's probes, sampled with the weights that the policy has now; every rank must call this, also one
    without probes. One forward pass for each probe: together they could exceed the token budget."""
    unscored = RewardOutcome(reward=0.0, parts={})
    with failing_together(mesh):
        sequences = [
            to_sequence(ScoredRollout(rollout=rollout, outcome=unscored, advantage=0.0), index)
            for index, rollout in enumerate(probes)
        ]
    distances = []
    for number in range(max(gather_objects(mesh, len(sequences)))):
        batch = lay_end_to_end(sequences[number : number + 1], {}).to(torch.device(mesh.device_type))
        distances.append((policy(batch).logprobs - batch.rollout_logprobs).abs()[batch.loss_mask])
    distance = torch.cat(distances) if distances else torch.empty(0)
    if not distance.numel():
        return {}
    return {
        "refit/probe_mean_abs_nats": Mean(float(distance.sum()), float(distance.numel())),
        "refit/probe_max_abs_nats": Max(float(distance.max())),
    }
