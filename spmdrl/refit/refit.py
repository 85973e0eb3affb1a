"""A refit gives the engine exactly the weights that the trainer holds, and verifies it by digests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config, RefitConfig
from spmdrl.dist.collectives import any_rank, gather_objects
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import device_bytes
from spmdrl.memory.buckets import bucket_bytes
from spmdrl.model.lora.adapters import Adapters
from spmdrl.model.policy import Policy
from spmdrl.refit.bucket import AdapterVersion, Bucket, WeightSink, bucket_of
from spmdrl.refit.gather import Gatherer, copy_all


class RefitMismatch(RuntimeError):
    """The engine does not hold the weights that the trainer sent."""


class Refit:
    """Puts a policy's weights into an engine. Built once for a run, with the bucket plan and two flat buffers.

    While the engine copies one bucket, the ranks gather the next one into the other buffer.
    """

    def __init__(
        self,
        policy: Policy,
        engine: WeightSink,
        meshes: Meshes,
        cfg: RefitConfig,
        *,
        dtype: torch.dtype,
        merge: bool = False,
        quantize: bool = False,
    ) -> None:
        """`merge` gives the engine weights with what adapters add to them; `quantize` gives it projections in e4m3 with
        scales of blocks."""
        self._engine = engine
        self._mesh = meshes.training
        self._gatherer = Gatherer(
            policy,
            meshes.model.copy,
            dtype=dtype,
            bucket_bytes=bucket_bytes(cfg, device_bytes=device_bytes() if engine.device.type == "cuda" else None),
            naming=engine.naming,
            merge=merge,
            quantize=quantize,
        )
        self._buffers = [engine.allocate(self._gatherer.largest_bytes) for _ in range(2)]
        self._verify = cfg.verify
        self._done = 0

    def __call__(self, *, version: int) -> None:
        """Load the policy's weights of this version; every rank that trains must call this.

        Frozen weights are left out where the engine has them from the refit before. Raises RefitMismatch on every rank,
        naming the first tensors that differ, when a comparison of digests fails.
        """
        verifies = self._verifies()
        expected: dict[str, str] = {}
        buckets = self._buckets()
        self._engine.begin_update(buckets, self._buffers, version=version)
        for number, bucket in enumerate(buckets):
            flat = self._buffers[number % len(self._buffers)]
            self._gatherer.fill(bucket, flat)
            if verifies:
                expected |= self._engine.digests_of(bucket, flat)
            self._engine.wait()
            self._engine.load(number)
        self._engine.wait()
        self._engine.end_update()
        self._done += 1
        if verifies:
            require_equal(self._mesh, self._engine.differing(expected), version=version)

    def _buckets(self) -> tuple[Bucket, ...]:
        """Return the buckets to send: those of frozen weights too unless every engine has them."""
        everything, changing = self._gatherer.buckets, self._gatherer.changing
        if everything is changing or self._done == 0:
            return everything
        return everything if any_rank(self._mesh, not self._engine.has_weights) else changing

    def _verifies(self) -> bool:
        if isinstance(self._verify, int):
            return self._done % self._verify == 0
        return self._verify == "every" or self._done == 0


def require_equal(mesh: DeviceMesh, differing: Sequence[str], *, version: int) -> None:
    """Raise RefitMismatch on every rank of the mesh when some of them found tensors that differ."""
    names = sorted({name for names in gather_objects(mesh, list(differing)) for name in names})
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RefitMismatch(
            f"after the refit to version {version} the engine does not hold the trainer's weights: "
            f"{', '.join(names[:3])}{more} differ"
        )


def load_whole(engine: WeightSink, tensors: dict[str, torch.Tensor], *, version: int) -> None:
    """Load tensors that are not sharded into an engine."""
    bucket = bucket_of(list(tensors.items()))
    buffer = engine.allocate(bucket.num_bytes)
    for entry in bucket.flat_entries:
        entry.view(buffer).copy_(tensors[entry.name].detach())
    engine.begin_update([bucket], [buffer], version=version)
    engine.load(0)
    engine.wait()
    engine.end_update()


# Refits of adapters alone: the engine loads the base once, and each version is then one bucket of its adapters.


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
    quantize = cfg.rollout.quantization == "fp8"
    whole = Refit(policy, engine, meshes, cfg.refit, dtype=dtype, merge=cfg.merges_adapters, quantize=quantize)
    if not cfg.sends_adapters:
        return whole
    assert policy.adapters is not None
    return AdapterRefit(whole, policy.adapters, engine, meshes, dtype=dtype)
