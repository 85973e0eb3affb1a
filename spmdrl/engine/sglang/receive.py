"""SGLang on ranks that do not train: its processes receive buckets themselves, in a group with the trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from spmdrl.config.plan import Plan
from spmdrl.data.image_store import ImageStore
from spmdrl.dist.collectives import gather_objects
from spmdrl.dist.link import Link
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import listening_store
from spmdrl.engine.channels import FIRST, ORDERS
from spmdrl.engine.protocol import EngineDied
from spmdrl.engine.remote import RemoteEngine
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.engine import SGLangEngine
from spmdrl.engine.sglang.options import SGLangOptions
from spmdrl.refit.bucket import Bucket

GROUP_NAME = "spmdrl_weights"
_DERIVED = ".gemma_weight"  # what norms compute from their weight, which has a checksum of its own


def backend_for(device_type: str) -> str:
    """Name the backend of torch.distributed that carries buckets."""
    return "nccl" if device_type == "cuda" else "gloo"


class ListeningSGLangEngine(SGLangEngine):
    """An `SGLangEngine` whose `load` lets its processes receive the bucket by broadcast."""

    def __init__(self, options: SGLangOptions, meshes: Meshes, *, model_config: Any, images: ImageStore | None) -> None:
        """Start the engine, then join the group for weights: the sender is its rank 0, and every engine's devices
        follow in order."""
        super().__init__(options, meshes.engine, model_config=model_config, transport="shared_memory", images=images)
        address, port = Link(meshes.world, ORDERS).receive(source=FIRST)
        if self._process is not None:
            self._process.ask(
                "init_weights_update_group",
                "InitWeightsUpdateGroupReqInput",
                master_address=address,
                master_port=port,
                rank_offset=1 + meshes.engine_index * meshes.engine.size(),
                world_size=1 + meshes.engines.size(),
                group_name=GROUP_NAME,
                backend=backend_for(meshes.engine.device_type),
            )

    def begin_update(self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], *, version: int) -> None:
        self._settle()
        self._buckets, self._next_version = buckets, version
        if self._process is not None:
            self._process.ask("begin_weight_update", "BeginWeightUpdateReqInput", selector="all")

    def load(self, number: int) -> None:
        """The last bucket carries the version and drops the cache of the old weights."""
        assert self._loading is None, "wait for the bucket before"
        is_last = number == len(self._buckets) - 1
        entries = self._buckets[number].flat_entries
        if self._process is not None:
            self._loading = self._process.start(
                self._process.asking(
                    "update_weights_from_distributed",
                    "UpdateWeightsFromDistributedReqInput",
                    names=[entry.name for entry in entries],
                    dtypes=[str(entry.dtype).removeprefix("torch.") for entry in entries],
                    shapes=[list(entry.shape) for entry in entries],
                    group_name=GROUP_NAME,
                    load_format="flattened_bucket",  # one flat tensor: the entries end to end, as a bucket has them
                    flush_cache=is_last,
                    weight_version=str(self._next_version) if is_last else None,
                )
            )

    def differing(self, expected: dict[str, str]) -> list[str]:
        """Compare SGLang's own checksums of what each device of the engine holds with what its rank expects."""
        self._expected |= expected  # what a refit leaves out must stay as it was
        expectations = gather_objects(self._mesh, self._expected)
        if self._process is None:
            return []
        try:
            _, _, ranks, _ = self._process.ask("check_weights", "CheckWeightsReqInput", action="checksum")
        except EngineDied:  # `require_alive` says so
            return []
        held = {info["parallelism_info"][0]["tp_rank"]: info["checksums"] for info in ranks}
        return sorted(
            name
            for rank, expectation in enumerate(expectations)
            for name in expectation.keys() | held[rank].keys()
            if expectation.get(name) != held[rank].get(name) and not name.endswith(_DERIVED)
        )


class SendingEngine(RemoteEngine):
    """A `RemoteEngine` whose group has processes that are no ranks of the run."""

    def close(self) -> None:
        """Leave the group. Its other processes are killed, and the usual end of an NCCL group waits for them."""
        if self._group is not None and dist.get_backend(self._group) == "nccl":
            self._group.abort()


def sending_group(plan: Plan, meshes: Meshes) -> dist.ProcessGroup | None:
    """Make the group in which engines receive weights, and wait until all have joined. None on ranks that do not
    send."""
    link = Link(meshes.world, ORDERS, in_flight=1)
    if meshes.training.get_local_rank() != 0:
        return None
    one_machine = os.environ.get("LOCAL_WORLD_SIZE", "1") == str(plan.num_ranks)
    address = "127.0.0.1" if one_machine else os.environ["MASTER_ADDR"]  # torchrun's: that of its first machine
    store = listening_store("127.0.0.1" if one_machine else "", address)
    for rank in range(plan.training_ranks, plan.num_ranks):
        link.send((address, store.port), to=rank)
    group = sglang_process.update_group(
        store, GROUP_NAME, num_ranks=1 + plan.engine_ranks, backend=backend_for(meshes.training.device_type)
    )
    link.settle()
    return group
