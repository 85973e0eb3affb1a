"""The FLOPs of training on a sequence, from the shapes of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from spmdrl.algo.packing import flop_coefficients
from spmdrl.config import ModelConfig, PackConfig
from spmdrl.config.plan import Plan
from spmdrl.model.load import parameter_shapes
from spmdrl.preflight.shapes import tower_names


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
    one looks at an image once, whatever the sequences. Attention is counted as if every layer saw the whole sequence;
    `flop_coefficients` has the formula.
    """
    text, in_tower = model_config.get_text_config(), tower_names(model_config, shapes)
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    parameters = 0
    for name, shape in shapes.items():
        is_product = "embed_tokens" not in name or model_config.tie_word_embeddings  # a tied one is also the head
        if len(shape) > 1 and is_product and name not in in_tower:
            parameters += math.prod(shape) * chosen // num_experts if len(shape) == 3 else math.prod(shape)
    return flop_coefficients(
        matmul_parameters=parameters,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
    )
