"""How SGLang is started for adapters, and which adapters it cannot apply."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.model.adapted import plan_adapters
from spmdrl.model.expert_adapters import ExpertsTarget
from spmdrl.model.load import load_model_config, model_without_memory
from spmdrl.model.targets import ALL_LINEAR, targets_of
from spmdrl.types import UserError

# SGLang computes layers with the same input as one. It fills what is missing beside one that is there with zeros, but
# looks for it beside these only.
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
        return  # said where the model is checked
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
        """The last part of a layer's name, with those that SGLang wants beside it and that are not adapted there."""
        found: dict[tuple[str, tuple[str, ...]], None] = {}
        for name in self.layers:
            parent, _, module = name.rpartition(".")
            wanted = _WANTED_BESIDE.get(module, ())
            if absent := tuple(beside for beside in wanted if f"{parent}.{beside}" not in self.layers):
                found[module, absent] = None
        return list(found)
