"""Rotary embeddings that SGLang computes otherwise than transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_TOLERANCE = 1e-6  # of the scale of queries and keys


def rotary_problems(model_dir: str, model_config: Any) -> Iterator[str]:
    """Yield a sentence for each reason why SGLang would rotate queries and keys otherwise than the trainer."""
    text = model_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic" and "alpha" not in rope and rope["factor"] != 1:
        yield (
            f'model.path = "{model_dir}" has rope_type = "dynamic", by which SGLang changes the rotary frequencies of '
            f"all sequences, and transformers those of more than {text.max_position_embeddings} tokens; write "
            '"default" into its config.json, which is the same up to there, or set rollout.engine = "torch"'
        )
    if rope.get("rope_type") == "longrope":
        theirs = _scale_in_sglang(text, rope)
        ours = rope["short_mscale"] if text.model_type == "phimoe" else ROPE_INIT_FUNCTIONS["longrope"](text)[1]
        if abs(theirs - ours) > _TOLERANCE:
            yield (
                f'model.path = "{model_dir}" has queries and keys that transformers scales by {ours:.6g} and SGLang by '
                f"{theirs:.6g}, because it does not read attention_factor and factor of longrope; write short_mscale = "
                f'{ours} and long_mscale = {ours} beside them in its config.json, or set rollout.engine = "torch"'
            )


def _scale_in_sglang(text: Any, rope: dict[str, Any]) -> float:
    """The factor of the cosines and sines of short sequences, as in `Phi3LongRoPEScaledRotaryEmbedding`."""
    if (given := rope.get("short_mscale")) is not None:
        return float(given)
    limit = getattr(text, "original_max_position_embeddings", None) or rope["original_max_position_embeddings"]
    scale = text.max_position_embeddings / limit
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(limit))
