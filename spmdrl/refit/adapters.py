"""Refits of adapters alone: the base goes into the engine once, and each version is then one bucket of its adapters."""

from __future__ import annotations

from typing import Protocol

import torch

from spmdrl.config import Config
from spmdrl.dist.collectives import any_rank
from spmdrl.dist.mesh import Meshes
from spmdrl.model.adapters import Adapters
from spmdrl.model.policy import Policy
from spmdrl.refit.bucket import bucket_of
from spmdrl.refit.gather import copy_all
from spmdrl.refit.refit import Refit, require_equal
from spmdrl.refit.sink import AdapterVersion, WeightSink


class Refitting(Protocol):
    """Puts the policy's weights into an engine; every rank that trains must call it."""

    def __call__(self, *, version: int) -> None: ...


class AdapterRefit:
    """Puts a policy's adapters into an engine, and its base where the engine does not have it.

    Every rank holds all adapters, so nothing is gathered. What the engine has cached of earlier versions stays valid
    for these versions, and nothing has to end before a newer one comes.
    """

    def __init__(
        self, base: Refit, adapters: Adapters, engine: WeightSink, meshes: Meshes, *, dtype: torch.dtype
    ) -> None:
        """`base` loads the frozen weights; adapters are sent as `dtype`, in which the trainer computes with them."""
        self._base, self._engine, self._mesh = base, engine, meshes.training
        self._adapters = adapters
        tensors = adapters.tensors
        self._bucket = bucket_of(
            [(name, torch.empty_like(x, dtype=dtype, device="meta")) for name, x in tensors.items()]
        )
        self._flat = torch.empty(self._bucket.num_bytes, dtype=torch.uint8, device=next(iter(tensors.values())).device)
        self._targets = {entry.name: entry.view(self._flat) for entry in self._bucket.flat_entries}

    @torch.no_grad()
    def __call__(self, *, version: int) -> None:
        """Load the policy's adapters of this version; every rank that trains must call this.

        Raises RefitMismatch on every rank, naming the first tensors that differ, when an engine does not hold what it
        was sent.
        """
        if any_rank(self._mesh, not self._engine.has_weights):
            self._base(version=version)
        tensors = self._adapters.tensors
        copy_all(list(self._targets.values()), [tensors[name] for name in self._targets])
        adapters = AdapterVersion(version, self._adapters.config, self._bucket, self._flat)
        require_equal(self._mesh, self._engine.load_adapters(adapters), version=version)


def make_refit(policy: Policy, engine: WeightSink, meshes: Meshes, cfg: Config, *, dtype: torch.dtype) -> Refitting:
    """Make what refits the engine: with all weights, or with adapters alone where the policy has some and `lora.merge`
    does not put them into its weights."""
    whole = Refit(policy, engine, meshes, cfg.refit, dtype=dtype, merge=cfg.merges_adapters)
    if not cfg.sends_adapters:
        return whole
    assert policy.adapters is not None
    return AdapterRefit(whole, policy.adapters, engine, meshes, dtype=dtype)
