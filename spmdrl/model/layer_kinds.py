"""Kinds of layers: those that attend, those that are recurrent, and how much these remember of a sequence."""

from __future__ import annotations

from typing import Any

from spmdrl.families import family_of

# In `layer_types` of transformers' configs.
RECURRENT = "linear_attention"
RECURRENT_KINDS = {RECURRENT, "conv"}
BOTH_KINDS = {"hybrid"}  # attention and a recurrent layer side by side
OTHER_KINDS = {"mlp", "moe"}  # where these are layers of their own


def _kinds(config: Any) -> list[str]:
    num_layers = config.num_hidden_layers
    return (getattr(config, "layer_types", None) or ["full_attention"] * num_layers)[:num_layers]


def recurrent_layers(config: Any) -> list[int]:
    """Number the layers that remember a state of fixed size."""
    return [layer for layer, kind in enumerate(_kinds(config)) if kind in RECURRENT_KINDS | BOTH_KINDS]


def attending_layers(config: Any) -> list[int]:
    """Number the layers that remember the keys and values of every token."""
    return [layer for layer, kind in enumerate(_kinds(config)) if kind not in RECURRENT_KINDS | OTHER_KINDS]


def layers_with_mlps(config: Any) -> int:
    """Count the layers with an MLP or experts: all, but where these are layers of their own."""
    kinds = _kinds(config)
    own = sum(kind in OTHER_KINDS for kind in kinds)
    return own or len(kinds)


def recurrent_widths(config: Any) -> tuple[int, int]:
    """Count the elements of a token that autograd keeps of a recurrent layer: in the compute dtype, and in float32."""
    family = family_of(config)
    if not recurrent_layers(config):
        return 0, 0
    if family.has_short_convs:
        return 7 * config.hidden_size, 0
    if family.mamba2 is not None:
        heads, head_dim, groups, state, _ = (getattr(config, name) for name in family.mamba2.sizes)
        values = heads * head_dim
        channels = values + 2 * groups * state
        return 2 * channels + values, channels + 8 * values
    values = config.linear_num_value_heads * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    return 5 * channels + 5 * values, 4 * values


def cached_heads(config: Any) -> dict[int, tuple[int, int]]:
    """Map each layer that attends to (number of key heads, their size); its values have heads of this size too.

    Latent attention (MLA) is counted as it computes: a key and a value for each query head.
    """
    return {layer: _key_heads(config, layer) for layer in attending_layers(config)}


def _key_heads(config: Any, layer: int) -> tuple[int, int]:
    if getattr(config, "kv_lora_rank", None):
        return config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[layer]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def remembered_elements(config: Any) -> tuple[int, int]:
    """Count what all recurrent layers remember of one sequence: (inputs of convolutions, elements of states)."""
    layers, family = len(recurrent_layers(config)), family_of(config)
    if not layers:
        return 0, 0
    if family.has_short_convs:
        return layers * config.hidden_size * (config.conv_L_cache - 1), 0
    if family.mamba2 is not None:
        heads, head_dim, groups, state, width = (getattr(config, name) for name in family.mamba2.sizes)
        conv = (heads * head_dim + 2 * groups * state) * (width - 1)
        return layers * conv, layers * heads * head_dim * state
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    conv = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    return layers * conv, layers * values * config.linear_key_head_dim
