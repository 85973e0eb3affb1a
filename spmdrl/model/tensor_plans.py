"""The tensor-parallel plans that transformers has for each architecture, and those of others with the same layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spmdrl.model.trunk import Trunk

# Decoders without a plan in transformers, and those whose layers they have.
_SAME_LAYERS = {"qwen3_vl_text": "qwen3"}


def decoder_plan(config: Any) -> Mapping[str, str]:
    """Return the style of each module of a decoder that is split, by its name in the decoder; {} without a plan.

    `config` is the decoder's own, which of a model with a tower is its text config.
    """
    same = _SAME_LAYERS.get(config.model_type)
    plan = getattr(config if same is None else CONFIG_MAPPING[same], "base_model_tp_plan", None)
    return plan or {}


def model_plan(model: PreTrainedModel) -> Mapping[str, str]:
    """Return the style of each module of a model that is split, by its name in the model; {} without a plan."""
    config = model.config.get_text_config()
    if config.model_type not in _SAME_LAYERS:
        plan: Mapping[str, str] = model.tp_plan
        return plan
    decoder = Trunk(model).decoder
    (name,) = (name for name, module in model.named_modules() if module is decoder)
    return {f"{name}.{module}": style for module, style in decoder_plan(config).items()}
