"""The torch engine on a rank that does not train: it receives buckets by broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.engine.torch_engine import TorchEngine
from spmdrl.refit.bucket import Bucket


class ListeningTorchEngine(TorchEngine):
    """A `TorchEngine` whose `load` receives the bucket first, into memory of its own."""

    def __init__(self, model_config: Any, weights: DeviceMesh, **settings: Any) -> None:
        """`weights` holds the sending rank first, then all that receive; `settings` go to `TorchEngine`."""
        super().__init__(model_config, **settings)
        self._group = weights.get_group()
        self._sender = int(weights.mesh[0])
        self._landing: Tensor | None = None

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        largest = max(bucket.num_bytes for bucket in buckets)
        if self._landing is None or self._landing.numel() < largest:
            self._landing = self.allocate(largest)
        super().begin_update(buckets, [self._landing], version=version)

    def load(self, number: int) -> None:
        assert self._landing is not None
        landing = self._landing[: self._buckets[number].num_bytes]
        dist.broadcast(landing, src=self._sender, group=self._group)
        super().load(number)
