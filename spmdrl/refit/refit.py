"""One refit: after it, the engine samples with exactly the weights the trainer holds."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.model.policy import Policy
from spmdrl.refit.gather import Gatherer
from spmdrl.rollout.engine import RolloutEngine


class Refit:
    """Puts a policy's weights into an engine. Built once: it keeps the manifest and the flat buffers."""

    def __init__(self, policy: Policy, mesh: DeviceMesh, *, dtype: torch.dtype, bucket_bytes: int) -> None:
        self._gatherer = Gatherer(policy, mesh, dtype=dtype, bucket_bytes=bucket_bytes)

    def __call__(self, engine: RolloutEngine, *, version: int) -> None:
        """Load the policy's weights of this version; every rank of the mesh must call this."""
        engine.begin_update()
        for bucket in self._gatherer.buckets():
            engine.load_bucket(bucket)
        engine.end_update(version)
