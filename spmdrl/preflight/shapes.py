"""The inputs of the memory arithmetic: a model's widths, and the weights that parallelism splits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from spmdrl.algo.packing import flop_coefficients
from spmdrl.config import ModelConfig, PackConfig
from spmdrl.config.plan import Plan
from spmdrl.families import family_of, vision_family
from spmdrl.memory.activations import Decoder
from spmdrl.memory.images import Tower
from spmdrl.model.fused import has_fused_layers
from spmdrl.model.layer_kinds import (
    attending_layers,
    cached_heads,
    layers_with_mlps,
    recurrent_layers,
    recurrent_widths,
    remembered_elements,
)
from spmdrl.model.load import parameter_shapes
from spmdrl.model.split import decoder_plan

# The FLOPs of training on a sequence, from the shapes of a model.


def with_costs(plan: Plan, pack: PackConfig, cfg: ModelConfig, model_config: Any) -> Plan:
    """Add the cost of sequences to the plan, unless work is balanced by tokens."""
    if pack.balance == "tokens":
        return plan
    shapes, _ = parameter_shapes(model_config, cfg)
    linear, quadratic = sequence_flops(model_config, shapes)
    return dataclasses.replace(plan, cost_per_token=linear, cost_per_squared_token=quadratic)


def sequence_flops(model_config: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return what `forward_flops` does, in the largest unit in which both are whole numbers."""
    linear, quadratic = forward_flops(model_config, shapes)
    unit = math.gcd(linear, quadratic)
    return linear // unit, quadratic // unit


def forward_flops(model_config: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return (linear, quadratic): a forward pass over T tokens takes linear T + quadratic T^2 FLOPs.

    `shapes` are those of the model's parameters, of which those of a tower for images do nothing for tokens: a frozen
    one encodes an image once, whatever the sequences. Attention is counted as if every layer that has it saw the whole
    sequence; `flop_coefficients` has the formula.
    """
    text, in_tower = model_config.get_text_config(), tower_names(model_config, shapes)
    chosen, experts, parameters = experts_per_token(text) or 1, expert_names(shapes), 0
    for name, shape in shapes.items():
        is_product = ".embed" not in name or model_config.tie_word_embeddings  # a tied one is also the head
        if len(shape) > 1 and is_product and name not in in_tower:
            parameters += math.prod(shape) * chosen // shape[0] if name in experts else math.prod(shape)
    return flop_coefficients(
        matmul_parameters=parameters,
        num_layers=len(attending_layers(text)),
        num_heads=text.num_attention_heads,
        head_dim=max(size for _, size in cached_heads(text).values()),
    )


def experts_per_token(text: Any) -> int:
    """Count the experts of a token in a layer, by the config of a language model; 0 without experts."""
    names = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_experts_per_token")
    return _first_width(text, *names) or 0


def _first_width(config: Any, *names: str) -> int | None:
    """Return the first of these settings that a config has; where it lists one for each layer, the largest."""
    for value in filter(None, (getattr(config, name, None) for name in names)):
        return max(value) if isinstance(value, list | tuple) else int(value)
    return None


_LAYER = re.compile(r"\.layers\.\d+\.")
_LAST_OF_MLP = ("down_proj.weight", "output_linear.weight")
_FIRST_BLOCK = re.compile(r"\.(blocks|layers)\.0\.")  # of a tower
# Styles of a tensor-parallel plan whose weights are whole on every rank.
_WHOLE = ("replicated", "sequence_parallel", "moe_", "ep_", "gather", "mla_")


def decoder_of(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Decoder:
    """Read a model's widths from transformers' `config` and the shapes of its parameters."""
    in_tower = tower_names(config, shapes)
    config = config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    cached = cached_heads(config)
    sizes = [size for _, size in cached.values()]
    head_width = max(sizes)
    mlp_width = _first_width(config, "shared_intermediate_size", "intermediate_size", "ffn_hidden_size") or 4 * hidden
    mlp_width *= 2 if getattr(config, "use_double_wide_mlp", False) else 1
    num_chosen = experts_per_token(config) if expert_names(shapes) else 0
    expert_widths = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    expert_width = _first_width(config, *expert_widths) or mlp_width
    passes_keys = family_of(config).passes_keys_on
    conv_elements, state_elements = remembered_elements(config)
    in_text = shapes.keys() - in_tower
    first_layer = [name for name in in_text if ".layers.0." in name]
    return Decoder(
        num_layers=config.num_hidden_layers,
        hidden=hidden,
        query_width=heads * head_width,
        heads_share=sum(sizes) / len(sizes) / head_width,
        rotary_width=sum(set(sizes)) if len(set(sizes)) > 1 else head_width * _num_rotary(config),
        key_width=max(number * size for number, size in cached.values()),
        query_heads=heads,
        head_width=head_width,
        mlp_width=expert_width * num_chosen or mlp_width,
        experts_per_token=num_chosen,
        shared_width=_width_beside_experts(shapes) if num_chosen else 0,
        latent_width=sum(_first_width(config, name) or 0 for name in ("q_lora_rank", "kv_lora_rank")),
        own_inputs=getattr(config, "hidden_size_per_layer_input", None) or 0,
        passed_keys=sum(number * size for number, size in set(cached.values())) if passes_keys else None,
        norms=sum("norm" in name and shapes[name] == (hidden,) for name in first_layer),
        has_wide_norms=family_of(config).has_wide_norms,
        has_head_norms=any(name.endswith("q_norm.weight") for name in first_layer),
        vocabulary=config.vocab_size,
        can_be_fused=has_fused_layers(config),
        cached_width=sum(number * size for number, size in cached.values()),
        num_attending=len(cached),
        num_mlps=layers_with_mlps(config),
        num_recurrent=len(recurrent_layers(config)),
        recurrent_widths=recurrent_widths(config),
        has_gate=any("gate_" in name for name in in_text) or not any(".up_proj" in name for name in in_text),
        conv_elements=conv_elements,
        state_elements=state_elements,
    )


def _num_rotary(text: Any) -> int:
    """Count the rotary embeddings of a model: one for each kind of layer where these have settings of their own."""
    kinds = getattr(text, "layer_types", None) or []
    return sum(kind in (getattr(text, "rope_parameters", None) or {}) for kind in set(kinds)) or 1


def _width_beside_experts(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the width of the MLP beside the experts of a layer, which every token has; 0 without one."""
    layers = [match.group() for name in expert_names(shapes) if (match := _LAYER.search(name))]
    beside = [n for n in shapes.keys() - expert_names(shapes) if layers and layers[0] in n and n.endswith(_LAST_OF_MLP)]
    return sum(shapes[name][-1] for name in beside)


def tower_of(config: Any, shapes: Mapping[str, tuple[int, ...]]) -> Tower | None:
    """Read the widths of a model's tower for images; None for a model of text."""
    family = vision_family(config)
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
        wide_norms=7 if family.has_padded_tower else 0,  # of which those of values have no weights
        clips=getattr(vision, "use_clipped_linears", False),
        rotates=family.has_grid_positions,
        pools=family.tokens_per_image is not None or family.has_padded_tower,
        patch_values=family.patch_values,
        patches_per_token=family.merge**2,
        num_levels=family.num_levels,
        features_width=config.get_text_config().hidden_size,
        parameters=sum(math.prod(shapes[name]) for name in names),
        block_parameters=sum(math.prod(shapes[name]) for name in first_block),
    )


def tower_names(config: Any, names: Iterable[str]) -> frozenset[str]:
    """Select the parameters of a model's tower for images."""
    family = vision_family(config)
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
