"""The sizes of models as their makers publish them, so that a run can be planned before anything is downloaded."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3VLConfig

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
# As in _DENSE, of a model with a tower for images. These and _TOWER are those of the copy of its config.json in
# DiffSynth's WanMLLMEncoder, and give the 4.44 billion parameters that it is said to have.
_VISION = {
    "Qwen3-VL-4B-Instruct": (2560, 9728, 36, 32, 8, True),
}
_TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
_POSITIONS = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
PUBLISHED = (*_DENSE, *_EXPERTS, *_VISION)


def published_config(name: str) -> Any:
    """Make transformers' config of a model in `PUBLISHED`. Raises UserError for another name."""
    if name not in PUBLISHED:
        raise UserError(f'the shape of "{name}" is not known; name one of {", ".join(PUBLISHED)}')
    hidden, width, layers, heads, key_heads, tied = (_DENSE | _EXPERTS | _VISION)[name]
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
    }
    if name in _DENSE:
        return Qwen3Config(**_QWEN3, **sizes, intermediate_size=width, architectures=["Qwen3ForCausalLM"])
    if name in _VISION:
        text = _QWEN3 | sizes | {"intermediate_size": width, "rope_parameters": _POSITIONS}
        return Qwen3VLConfig(
            text_config=text | {"max_position_embeddings": 262144},
            vision_config=_TOWER | {"out_hidden_size": hidden},
            tie_word_embeddings=tied,
            dtype="bfloat16",
            architectures=["Qwen3VLForConditionalGeneration"],
        )
    return Qwen3MoeConfig(
        **_QWEN3,
        **sizes,
        moe_intermediate_size=width,
        num_experts=128,
        num_experts_per_tok=8,
        architectures=["Qwen3MoeForCausalLM"],
    )
