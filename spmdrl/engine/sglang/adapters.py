"""Adapters in SGLang: a name for each version, loaded beside the others, and unloaded when no request needs it.

SGLang can compare cryptographic checksums of adapters, and ends when they differ. They would take most of the time of a
refit, so its processes compare the digest that all refits use (`scheduler.py`), and refuse what differs.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.layout import Share, padded_adapters
from spmdrl.engine.sglang.process import SGLangProcess
from spmdrl.engine.versions import LiveVersions
from spmdrl.refit.bucket import Bucket, bucket_of
from spmdrl.refit.digest import digest, digests
from spmdrl.refit.sink import AdapterVersion

DIGEST = "digest"  # in the config of adapters: that of their memory
MISMATCH = "the digest differs: "  # followed by those of the tensors that arrived, as JSON


class AdapterSlots:
    """The versions whose adapters one SGLang engine holds."""

    def __init__(self, share: Share) -> None:
        """`share` is any device's."""
        self._share = share
        self._versions = LiveVersions()
        # SGLang may read a version's tensors as long as it holds them, so each version has memory of its own, which is
        # used again when the version is gone.
        self._memory: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []
        self._plan: _Plan | None = None
        self._unloading: dict[int, Future[Any]] = {}

    def load(self, process: SGLangProcess, adapters: AdapterVersion) -> list[str]:
        """Load a version, and begin to unload those that no request needs. Returns the names of tensors that arrived
        otherwise than they were sent. Raises EngineDied when the engine dies meanwhile."""
        version = adapters.version
        if self._versions.holds(version):  # engines are given their weights once more when another has died
            self._unload(process, version)
        self.settle(process)
        plan, memory = self._in_own_memory(adapters)
        try:
            process.ask(
                "load_lora_adapter_from_tensors",
                "LoadLoRAAdapterFromTensorsReqInput",
                lora_name=_name(version),
                config_dict=_config(adapters, plan.modules) | {DIGEST: digest(memory)},
                load_format="flattened_bucket",
                # Each device may open what it is sent once; it gets everything, and takes its part.
                serialized_named_tensors=[
                    sglang_process.serialized_adapters(plan.tensors, memory) for _ in range(self._share.size)
                ],
            )
        except RuntimeError as refusal:
            _, is_mismatch, arrived = str(refusal).partition(MISMATCH)
            if not is_mismatch:
                raise
            given = padded_adapters(adapters.tensors, self._share)
            sent = digests({name: [tensor] for name, tensor in given.items()})
            return [name for name, found in json.loads(arrived).items() if found != sent.get(name)]
        self._memory[version] = memory
        self._versions.hold(version)
        for dead in self._versions.take_dead(version):
            self._unload(process, dead)
        return []

    def settle(self, process: SGLangProcess) -> None:
        """Wait until every version that no request needs is unloaded."""
        for version, unloading in self._unloading.items():
            process.result(unloading)
            self._spare.append(self._memory.pop(version))
        self._unloading.clear()

    def begin(self, version: int) -> str | None:
        """Note that a request of this version begins; return the name of its adapters, None when it has none."""
        self._versions.begin(version)
        return _name(version) if self._versions.holds(version) else None

    def end(self, version: int) -> None:
        """Note that a request of this version has ended."""
        self._versions.end(version)

    def none_running(self) -> None:
        """Note that nothing runs any more."""
        self._versions.none_running()

    def holds(self, version: int) -> bool:
        """Return True when the adapters of this version are loaded."""
        return self._versions.holds(version)

    def clear(self) -> None:
        """Forget everything: the engine was started again."""
        self._versions.clear()
        self._spare += self._memory.values()
        self._memory, self._unloading = {}, {}

    def _unload(self, process: SGLangProcess, version: int) -> None:
        asking = process.asking("unload_lora_adapter", "UnloadLoRAAdapterReqInput", lora_name=_name(version))
        self._unloading[version] = process.start(asking)

    def _in_own_memory(self, adapters: AdapterVersion) -> tuple[_Plan, Tensor]:
        """Copy adapters, padded as SGLang pads weights, into memory that its processes can open."""
        if self._plan is None or self._plan.given is not adapters.bucket:
            self._plan = _Plan.of(adapters, self._share)
        plan, bucket = self._plan, self._plan.padded
        memory = self._spare.pop() if self._spare else torch.empty(bucket.num_bytes, dtype=torch.uint8).share_memory_()
        if plan.pads_nothing:
            memory.copy_(adapters.flat)
        else:
            tensors = padded_adapters(adapters.tensors, self._share)
            for entry in bucket.flat_entries:
                entry.view(memory).copy_(tensors[entry.name])
        return plan, memory


@dataclass(frozen=True, slots=True)
class _Plan:
    """How adapters are sent; the same in each refit."""

    given: Bucket
    padded: Bucket
    pads_nothing: bool
    tensors: list[Any]  # of the padded ones, in SGLang's words
    modules: list[str]  # that have adapters

    @classmethod
    def of(cls, adapters: AdapterVersion, share: Share) -> _Plan:
        padded = bucket_of(list(padded_adapters(adapters.tensors, share).items()))
        modules = sorted({entry.name.split(".")[-3] for entry in padded.flat_entries})
        tensors = sglang_process.described(padded.flat_entries)
        return cls(adapters.bucket, padded, padded == adapters.bucket, tensors, modules)


def _name(version: int) -> str:
    return f"policy-{version}"


def _config(adapters: AdapterVersion, modules: list[str]) -> dict[str, object]:
    """SGLang divides alpha by the rank whatever PEFT's config says, and reads little else."""
    rank = adapters.config["r"]
    return {"peft_type": "LORA", "r": rank, "lora_alpha": adapters.scale * rank, "target_modules": modules}
