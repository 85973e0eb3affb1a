"""Adapters in SGLang: a name for each version, loaded next to the others, and unloaded when no request needs it.

SGLang can compare cryptographic checksums of adapters, and ends when they differ. They would take most of the time of a
refit, so its processes compare the digest that all refits use (`scheduler.py`), and refuse what differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.engine.protocol import AdapterRefs
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.layout import DIGEST, MISMATCH, TpShard, padded_adapters
from spmdrl.engine.sglang.process import SGLangProcess
from spmdrl.model.load import load_model_config, model_without_memory
from spmdrl.model.lora.layers import ExpertsTarget
from spmdrl.model.lora.policy import plan_adapters
from spmdrl.model.lora.targets import ALL_LINEAR, targets_of
from spmdrl.refit.bucket import AdapterVersion, Bucket, bucket_of
from spmdrl.refit.digest import digest, digests
from spmdrl.types import UserError

# How SGLang is started for adapters, and which adapters it cannot apply.


# SGLang computes layers with the same input as one. It fills what is missing next to one that is there with zeros, but
# searches for it next to these only.
_WANTED_BESIDE = {
    "q_proj": ("v_proj",),
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
}
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_MERGE = "or set lora.merge = true, which sends merged weights"


def adapter_problems(cfg: Config, model_config: Any, *, device_type: str) -> Iterator[str]:
    """Yield a sentence for each reason why SGLang could not apply the adapters of `[lora]`."""
    if not cfg.sends_adapters:
        return
    if cfg.true_on_policy:
        yield (
            'true_on_policy = true has no exact kernels for adapters in rollout.engine = "sglang"; set lora.merge = '
            "true, or true_on_policy = false"
        )
    try:
        adapted = _Adapted.of(cfg, model_config)
    except UserError:
        return  # reported where the model is checked
    modules = adapted.modules
    if adapted.adapts_experts:
        yield (
            'rollout.engine = "sglang" takes no adapters of experts, which lora.targets includes; set lora.merge = '
            "true, and it gets merged weights, or set lora.targets to some of "
            f"{', '.join(module for module in modules if module in _ADAPTED)}"
        )
        return
    if unknown := [module for module in modules if module not in _ADAPTED]:
        yield (
            f"SGLang has no adapters for {', '.join(unknown)}; set lora.targets to some of {', '.join(_ADAPTED)}, "
            f"{_MERGE}"
        )
    for module, absent in adapted.lacking:
        yield (
            f"SGLang adapts {module} together with {' and '.join(absent)} of the same layer; name "
            f"{' and '.join(absent)} in lora.targets too, {_MERGE}"
        )
    of_experts = [module for module in modules if module in _OF_EXPERTS]
    if device_type == "cpu" and adapted.has_experts and of_experts:
        yield (
            f"SGLang adapts the MLPs of models with experts on a CUDA device only, and lora.targets names "
            f"{', '.join(of_experts)}; set it to "
            f"{', '.join(module for module in _ADAPTED if module not in _OF_EXPERTS)}, {_MERGE}"
        )


def adapter_arguments(cfg: Config, plan: Plan, *, device_type: str) -> dict[str, Any]:
    """Return SGLang's arguments for adapters; none where it gets whole weights."""
    if not cfg.sends_adapters:
        return {}
    adapted = _Adapted.of(cfg, load_model_config(cfg.model))
    return {
        "enable_lora": True,
        "lora_backend": "torch_native" if device_type == "cpu" else "triton" if adapted.has_experts else "csgmv",
        "lora_strict_loading": True,
        "lora_target_modules": adapted.modules,
        "max_lora_rank": adapted.rank,
        # Requests of older versions still run where engines may be that many steps ahead.
        "max_loras_per_batch": plan.steps_ahead + 1,
        "enable_weights_cpu_backup": "weights" in cfg.offload.engine,  # refits do not bring the base back
    }


@dataclass(frozen=True, slots=True)
class _Adapted:
    """The part of a model that `[lora]` is about."""

    rank: int
    layers: tuple[str, ...]  # their names, in the order of the model
    has_experts: bool  # the model, adapted or not
    adapts_experts: bool

    @classmethod
    def of(cls, cfg: Config, model_config: Any) -> _Adapted:
        """Raises UserError like `plan_adapters`."""
        assert cfg.lora is not None
        model = model_without_memory(model_config, cfg.model)
        planned = plan_adapters(model, cfg.lora)
        targets = targets_of(model, planned.wanted)
        layers = tuple(target.module for target in targets if not isinstance(target, ExpertsTarget))
        has_experts = any(isinstance(target, ExpertsTarget) for target in targets_of(model, ALL_LINEAR))
        return cls(planned.sent_strength.rank, layers, has_experts, len(layers) < len(targets))

    @property
    def modules(self) -> list[str]:
        """The last parts of the layers' names."""
        return list(dict.fromkeys(name.rpartition(".")[2] for name in self.layers))

    @property
    def lacking(self) -> list[tuple[str, tuple[str, ...]]]:
        """The last part of a layer's name, with those that SGLang wants with it and that are not adapted there."""
        found: dict[tuple[str, tuple[str, ...]], None] = {}
        for name in self.layers:
            parent, _, module = name.rpartition(".")
            wanted = _WANTED_BESIDE.get(module, ())
            if absent := tuple(beside for beside in wanted if f"{parent}.{beside}" not in self.layers):
                found[module, absent] = None
        return list(found)


class AdapterSlots:
    """The versions whose adapters one SGLang engine has loaded."""

    def __init__(self, shard: TpShard) -> None:
        """`shard` is any device's."""
        self._shard = shard
        self._versions = AdapterRefs()
        # SGLang may read a version's tensors as long as they are loaded, so each version has memory of its own, which
        # is used again when the version is gone.
        self._memory: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []
        self._plan: _SendingPlan | None = None
        self._unloading: dict[int, Future[Any]] = {}

    def load(self, process: SGLangProcess, adapters: AdapterVersion) -> list[str]:
        """Load a version, and begin to unload those that no request needs. Returns the names of tensors that arrived
        otherwise than they were sent. Raises EngineDied when the engine dies meanwhile."""
        version = adapters.version
        if version in self._versions:  # engines are given their weights once more when another has died
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
                    sglang_process.serialized_adapters(plan.tensors, memory) for _ in range(self._shard.size)
                ],
            )
        except RuntimeError as refusal:
            _, is_mismatch, arrived = str(refusal).partition(MISMATCH)
            if not is_mismatch:
                raise
            given = padded_adapters(adapters.tensors, self._shard)
            sent = digests({name: [tensor] for name, tensor in given.items()})
            return [name for name, found in json.loads(arrived).items() if found != sent.get(name)]
        self._memory[version] = memory
        self._versions.add(version)
        for unused in self._versions.pop_unused(version):
            self._unload(process, unused)
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
        return _name(version) if version in self._versions else None

    def end(self, version: int) -> None:
        """Note that a request of this version has ended."""
        self._versions.end(version)

    def none_running(self) -> None:
        """Note that nothing runs any more."""
        self._versions.none_running()

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def clear(self) -> None:
        """Forget everything: the engine was started again."""
        self._versions.clear()
        self._spare += self._memory.values()
        self._memory, self._unloading = {}, {}

    def _unload(self, process: SGLangProcess, version: int) -> None:
        asking = process.asking("unload_lora_adapter", "UnloadLoRAAdapterReqInput", lora_name=_name(version))
        self._unloading[version] = process.start(asking)

    def _in_own_memory(self, adapters: AdapterVersion) -> tuple[_SendingPlan, Tensor]:
        """Copy adapters, padded as SGLang pads weights, into memory that its processes can open."""
        if self._plan is None or self._plan.given is not adapters.bucket:
            self._plan = _SendingPlan.of(adapters, self._shard)
        plan, bucket = self._plan, self._plan.padded
        memory = self._spare.pop() if self._spare else torch.empty(bucket.num_bytes, dtype=torch.uint8).share_memory_()
        if plan.pads_nothing:
            memory.copy_(adapters.flat)
        else:
            tensors = padded_adapters(adapters.tensors, self._shard)
            for entry in bucket.flat_entries:
                entry.view(memory).copy_(tensors[entry.name])
        return plan, memory


@dataclass(frozen=True, slots=True)
class _SendingPlan:
    """How adapters are sent; the same in each refit."""

    given: Bucket
    padded: Bucket
    pads_nothing: bool
    tensors: list[Any]  # of the padded ones, in SGLang's words
    modules: list[str]  # that have adapters

    @classmethod
    def of(cls, adapters: AdapterVersion, shard: TpShard) -> _SendingPlan:
        padded = bucket_of(list(padded_adapters(adapters.tensors, shard).items()))
        modules = sorted({entry.name.split(".")[-3] for entry in padded.flat_entries})
        tensors = sglang_process.flattened_metadata(padded.flat_entries)
        return cls(adapters.bucket, padded, padded == adapters.bucket, tensors, modules)


def _name(version: int) -> str:
    return f"policy-{version}"


def _config(adapters: AdapterVersion, modules: list[str]) -> dict[str, object]:
    """SGLang divides alpha by the rank whatever PEFT's config says, and reads little else."""
    rank = adapters.config["r"]
    return {"peft_type": "LORA", "r": rank, "lora_alpha": adapters.scale * rank, "target_modules": modules}
