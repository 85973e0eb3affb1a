"""The inputs of the memory arithmetic: a model's widths, and the weights that parallelism splits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from spmdrl.data.families import family_of
from spmdrl.memory.activations import Decoder
from spmdrl.memory.images import Tower
from spmdrl.model.fused import has_fused_layers
from spmdrl.model.layer_kinds import recurrent_layers, remembered_elements
from spmdrl.model.tensor_plans import decoder_plan

_FIRST_BLOCK = re.compile(r"\.(blocks|layers)\.0\.")  # of a tower
# Styles of a tensor-parallel plan whose weights are whole on every rank.
_WHOLE = ("replicated", "sequence_parallel", "moe_", "ep_", "gather")


def decoder_of(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Decoder:
    """Read a model's widths from transformers' `config` and the shapes of its parameters."""
    in_tower = tower_names(config, shapes)
    config = config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or hidden // heads
    mlp_width = getattr(config, "intermediate_size", None) or 4 * hidden
    experts_per_token = getattr(config, "num_experts_per_tok", None) or 0
    expert_width = getattr(config, "moe_intermediate_size", None) or mlp_width
    conv_elements, state_elements = remembered_elements(config)
    first_layer = [name for name in shapes.keys() - in_tower if ".layers.0." in name]
    return Decoder(
        num_layers=config.num_hidden_layers,
        hidden=hidden,
        query_width=heads * head_width,
        key_width=(getattr(config, "num_key_value_heads", None) or heads) * head_width,
        query_heads=heads,
        head_width=head_width,
        mlp_width=expert_width * experts_per_token or mlp_width,
        experts_per_token=experts_per_token,
        norms=sum("norm" in name and shapes[name] == (hidden,) for name in first_layer),
        has_head_norms=any(name.endswith("q_norm.weight") for name in first_layer),
        vocabulary=config.vocab_size,
        can_be_fused=has_fused_layers(config),
        recurrent_layers=len(recurrent_layers(config)),
        conv_elements=conv_elements,
        state_elements=state_elements,
    )


def tower_of(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Tower | None:
    """Read the widths of a model's tower for images; None for a model of text."""
    family = family_of(config)
    if family is None:
        return None
    vision, names = config.vision_config, tower_names(config, shapes)
    first_block = {name for name in names if _FIRST_BLOCK.search(name)}
    return Tower(
        num_blocks=getattr(vision, "depth", None) or vision.num_hidden_layers,
        hidden=vision.hidden_size,
        heads=getattr(vision, "num_heads", None) or vision.num_attention_heads,
        mlp_width=vision.intermediate_size,
        is_gated=any(".gate_proj." in name for name in first_block),
        has_rms_norms=not any("norm" in name and name.endswith(".bias") for name in first_block),
        rotates=family.has_grid_positions,
        pools=family.tokens_per_image is not None,
        patch_values=family.patch_values,
        patches_per_token=family.merge**2,
        num_levels=family.num_levels,
        features_width=config.get_text_config().hidden_size,
        parameters=sum(math.prod(shapes[name]) for name in names),
        block_parameters=sum(math.prod(shapes[name]) for name in first_block),
    )


def tower_names(config: Any, names: Iterable[str]) -> frozenset[str]:
    """Select the parameters of a model's tower for images."""
    family = family_of(config)
    parts = [] if family is None else [f".{module}." for module in family.tower]
    return frozenset(name for name in names if any(part in name for part in parts))


def split_by_tp(config: Any, names: Iterable[str]) -> frozenset[str]:
    """Select the parameters that the model's tensor-parallel plan divides."""
    plan = decoder_plan(config.get_text_config())
    patterns = [
        re.compile(re.escape(module).replace(r"\*", r"\d+") + r"(\.(weight|bias))?$")
        for module, style in plan.items()
        if not style.startswith(_WHOLE)
    ]
    return frozenset(name for name in names if any(pattern.search(name) for pattern in patterns))


def expert_names(names: Iterable[str]) -> frozenset[str]:
    """Select the parameters that hold one slice for each expert."""
    return frozenset(name for name in names if ".experts." in name)
