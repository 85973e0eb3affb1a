"""Adapters in SGLang: a name for each version, loaded beside the others, and unloaded when no request needs it."""

from __future__ import annotations

import hashlib
import re

import torch
from torch import Tensor

from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.layout import Share, padded_adapters
from spmdrl.engine.sglang.process import SGLangProcess
from spmdrl.engine.versions import LiveVersions
from spmdrl.refit.bucket import bucket_of
from spmdrl.refit.sink import AdapterVersion

MISMATCH = "[LORA-CHECK]"  # how SGLang begins when tensors are not those that their checksums belong to


class AdapterSlots:
    """The versions whose adapters one SGLang engine holds."""

    def __init__(self, share: Share) -> None:
        """`share` is any device's."""
        self._share = share
        self._versions = LiveVersions()

    def load(self, process: SGLangProcess, adapters: AdapterVersion) -> list[str]:
        """Load a version, then unload those that no request needs. Returns the names of the tensors that arrived
        otherwise than they were sent, by SGLang's own checksums. Raises EngineDied when the engine dies meanwhile."""
        version = adapters.version
        if self._versions.holds(version):  # engines are given their weights once more when another has died
            self._unload(process, version)
        tensors = padded_adapters(adapters.tensors, self._share)
        bucket = bucket_of(list(tensors.items()))
        # Memory of its own: SGLang may read a version's tensors as long as it holds them.
        own = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        for entry in bucket.flat_entries:
            entry.view(own).copy_(tensors[entry.name])
        try:
            process.ask(
                "load_lora_adapter_from_tensors",
                "LoadLoRAAdapterFromTensorsReqInput",
                lora_name=_name(version),
                config_dict=_config(adapters),
                load_format="flattened_bucket",
                # Each device may open what it is sent once; it gets everything, and takes its part.
                serialized_named_tensors=[
                    sglang_process.serialized_adapters(bucket.flat_entries, own) for _ in range(self._share.size)
                ],
                expected_checksums={name: _checksum(tensor) for name, tensor in tensors.items()},
            )
        except RuntimeError as refusal:
            if MISMATCH not in str(refusal):
                raise
            return re.findall(r"'([^']+)'", str(refusal))
        self._versions.hold(version)
        for dead in self._versions.take_dead(version):
            self._unload(process, dead)
        return []

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

    def _unload(self, process: SGLangProcess, version: int) -> None:
        process.ask("unload_lora_adapter", "UnloadLoRAAdapterReqInput", lora_name=_name(version))


def _name(version: int) -> str:
    return f"policy-{version}"


def _config(adapters: AdapterVersion) -> dict[str, object]:
    """SGLang divides alpha by the rank whatever PEFT's config says, and reads nothing that is not here."""
    rank = adapters.config["r"]
    modules = {entry.name.split(".")[-3] for entry in adapters.bucket.flat_entries}
    return {"peft_type": "LORA", "r": rank, "lora_alpha": adapters.scale * rank, "target_modules": sorted(modules)}


def _checksum(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
