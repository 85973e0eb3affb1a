"""The sizes of models as their makers publish them, so that a run can be planned before anything is downloaded."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig

from spmdrl.types import UserError

_QWEN3 = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "eos_token_id": 151645,
    "dtype": "bfloat16",
}

# From each model's config.json: hidden size, MLP width, layers, query heads, key heads, whether the head is tied.
_DENSE = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, False),
}
# As above, with the width of one expert; each of 128 experts, of which a token goes to 8.
_EXPERTS = {
    "Qwen3-30B-A3B": (2048, 768, 48, 32, 4, False),
    "Qwen3-235B-A22B": (4096, 1536, 94, 64, 4, False),
}
PUBLISHED = (*_DENSE, *_EXPERTS)


def published_config(name: str) -> Any:
    """Make transformers' config of a model in `PUBLISHED`. Raises UserError for another name."""
    if name not in PUBLISHED:
        raise UserError(f'the shape of "{name}" is not known; name one of {", ".join(PUBLISHED)}')
    hidden, width, layers, heads, key_heads, tied = (_DENSE | _EXPERTS)[name]
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
    }
    if name in _DENSE:
        return Qwen3Config(**_QWEN3, **sizes, intermediate_size=width, architectures=["Qwen3ForCausalLM"])
    return Qwen3MoeConfig(
        **_QWEN3,
        **sizes,
        moe_intermediate_size=width,
        num_experts=128,
        num_experts_per_tok=8,
        architectures=["Qwen3MoeForCausalLM"],
    )
