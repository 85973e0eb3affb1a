"""Kinds of layers: those that attend, those that are recurrent, and how much these remember of a sequence."""

from __future__ import annotations

from typing import Any

RECURRENT = "linear_attention"  # in `layer_types` of transformers' configs


def recurrent_layers(config: Any) -> list[int]:
    """Number the layers that remember a state of fixed size."""
    kinds = getattr(config, "layer_types", None) or ()
    return [layer for layer, kind in enumerate(kinds[: config.num_hidden_layers]) if kind == RECURRENT]


def attending_layers(config: Any) -> list[int]:
    """Number the layers that remember the keys and values of every token."""
    return sorted(set(range(config.num_hidden_layers)) - set(recurrent_layers(config)))


def remembered_elements(config: Any) -> tuple[int, int]:
    """Count what all recurrent layers remember of one sequence: (inputs of convolutions, elements of states)."""
    layers = len(recurrent_layers(config))
    if not layers:
        return 0, 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    conv = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    return layers * conv, layers * values * config.linear_key_head_dim
