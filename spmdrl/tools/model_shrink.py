"""A tiny model with the settings of a real one: sizes alone are changed, and `SIZES` lists all that may be.

Caps, scales, multipliers, partial rotary factors, layer patterns, the placement of norms, rules of routing and tied
weights stay as they are: a fault that a released setting brings to light must come to light here.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from spmdrl.families import family_of
from spmdrl.model.trunk import model_class

VOCABULARY = 128
_LIMIT = 48  # tokens from which on rotary settings differ by length; the longest sequences of the test have more
_MOST_LAYERS = 12

# All settings of a text model that may change, by what becomes of a value that is there.
SIZES: Mapping[str, str] = {
    "as the others need it": "num_hidden_layers hidden_size num_attention_heads num_key_value_heads "
    "linear_num_value_heads mamba_d_head mamba_d_ssm moe_layer_end_index mlp_only_layers hybrid_layer_ids "
    "max_position_embeddings original_max_position_embeddings rope_parameters num_layers",
    "in its ratio to the width": "intermediate_size moe_intermediate_size shared_expert_intermediate_size "
    "shared_intermediate_size moe_shared_expert_intermediate_size moe_latent_size hidden_size_per_layer_input "
    "dense_intermediate_size intermediate_size_mlp block_ff_dim block_dim conv_dim ffn_hidden_size "
    "expert_ffn_hidden_size",
    "an eighth, in steps of 16": "head_dim global_head_dim v_head_dim attention_head_dim",
    "an eighth, in steps of 8": "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim linear_key_head_dim "
    "linear_value_head_dim ssm_state_size mamba_d_state mamba_head_dim mamba_headdim",
    "0": "pad_token_id",
    "1": "eos_token_id",
    "2": "bos_token_id",
    "8": "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts "
    "mamba_num_heads mamba_n_heads n_mamba_heads zero_expert_num",
    "128": "vocab_size vocab_size_per_layer_input",
    "at most 2": "num_global_key_value_heads num_kv_shared_layers mamba_n_groups n_groups mamba_ngroups "
    "linear_num_key_heads topk_group",
    "at most 4": "num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token n_group",
    "at most 24": "sliding_window attention_chunk_size",  # fewer than the longest sequences of the test have
}
_RULES = {name: rule for rule, names in SIZES.items() for name in names.split()}
# Of a tower for images, whose output is as wide as the text model; its special tokens are the last of the vocabulary.
TOWER: Mapping[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers", "num_heads", "num_attention_heads", "num_key_value_heads"), 2),
    **{"hidden_size": 32, "head_dim": 16, "intermediate_size": 48, "num_position_embeddings": 64, "image_size": 56},
    "position_embedding_size": 64,
    **{"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1]},
}
# Of a tower for sounds.
OF_SOUNDS: Mapping[str, Any] = {
    **{"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "output_proj_dims": 32},
    "subsampling_conv_channels": [8, 4],
}
TOKENS_OF_IMAGES = (
    *("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"),
)
# By how the placeholders of an image are counted.
_PROCESSORS = {"grid": "Qwen2VLImageProcessor", "fixed": "Gemma3ImageProcessor", "pooled": "Gemma4ImageProcessor"}
# What follows from sizes, and is computed again by transformers; and what says how weights are stored.
_DERIVED = {"qk_head_dim", "per_layer_config", "quantization_config", "auto_map", "dtype", "model_type"}


def shrunk(config: Any) -> Any:
    """Return transformers' config of the tiny model with the settings of `config`."""
    values, text = copy.deepcopy(config.to_dict()), config.get_text_config()
    if text is config:
        return AutoConfig.for_model(config.model_type, **_text(values, text.num_hidden_layers))
    values["text_config"] = _text(values["text_config"], text.num_hidden_layers) | {"model_type": text.model_type}
    vision = values["vision_config"]
    vision |= {name: size for name, size in TOWER.items() if vision.get(name)}
    if sounds := values.get("audio_config"):
        sounds |= {name: size for name, size in OF_SOUNDS.items() if sounds.get(name)}
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = values["text_config"]["hidden_size"]
    if "mm_tokens_per_image" in values:
        values["mm_tokens_per_image"] = 4
    names = [name for name in TOKENS_OF_IMAGES if values.get(name) is not None]
    # Beyond what can be sampled: transformers takes such a token of Gemma 4 for padding, wherever it stands.
    values |= {name: VOCABULARY + place for place, name in enumerate(names)}
    return AutoConfig.for_model(config.model_type, **{k: v for k, v in values.items() if k not in _DERIVED})


def _text(real: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the settings of the tiny text model for those of a real one of `number` layers."""
    layers, heads, hidden = _num_layers(real, number), real["num_attention_heads"], real["hidden_size"]
    kv = real.get("num_key_value_heads") or heads
    tiny_kv = min(kv, 4 if kv == heads else 2)
    tiny_heads, width = tiny_kv * (heads // kv), 64
    if not real.get("kv_lora_rank"):  # heads in their ratio to the width
        per_head = real.get("head_dim") or hidden // heads
        width = max(32, _step(hidden * tiny_heads * _step(per_head / 8, 16) / (heads * per_head), 16))
    tiny = {name: value for name, value in real.items() if name not in _DERIVED}
    for name, value in real.items():
        if (rule := _RULES.get(name)) and value is not None:
            each = [_sized(rule, one, width, hidden) for one in (value if isinstance(value, list) else [value])]
            tiny[name] = each[0] if len(each) == 1 or name == "eos_token_id" else each
        elif _is_of_layers(name, value, number):
            tiny[name] = value[:layers]
    tiny |= {"num_hidden_layers": layers, "num_attention_heads": tiny_heads, "hidden_size": width}
    if "num_key_value_heads" in real:
        tiny["num_key_value_heads"] = tiny_kv
    _fit_others(tiny, real)
    return tiny


def _sized(rule: str, value: Any, width: int, hidden: int) -> Any:
    """Apply a rule of `SIZES` to one value of a model as wide as `hidden`; the tiny one has `width`."""
    if rule.isdecimal():
        return int(rule) if value or int(rule) < 3 else value  # no experts stay none
    if rule.startswith("at most"):
        return min(value, int(rule.split()[-1]))
    if rule.startswith("an eighth"):
        return _step(value / 8, int(rule.split()[-1]))
    return _step(min(value * width / hidden, 4 * width), 16) if rule.startswith("in its ratio") else value


def _step(value: float, size: int) -> int:
    return size * max(1, round(value / size))


def _fit_others(tiny: dict[str, Any], real: Mapping[str, Any]) -> None:
    layers, width = tiny["num_hidden_layers"], tiny["hidden_size"]
    if (real.get("sliding_window") or 0) >= (real.get("max_position_embeddings") or math.inf):  # no sequence is as long
        tiny["sliding_window"] = real["sliding_window"]
    if real.get("kv_lora_rank"):
        tiny.pop("head_dim", None)
        if real.get("head_dim") == real["qk_rope_head_dim"]:  # that of the rotated part
            tiny["head_dim"] = tiny["qk_rope_head_dim"]
    if real.get("linear_num_value_heads"):
        per_key = real["linear_num_value_heads"] // real["linear_num_key_heads"]
        tiny["linear_num_value_heads"] = tiny["linear_num_key_heads"] * per_key
    if real.get("mamba_expand") and real.get("mamba_d_head"):
        tiny["mamba_d_head"] = real["mamba_expand"] * width // tiny["mamba_n_heads"]
        if "mamba_d_ssm" in real:
            tiny["mamba_d_ssm"] = real["mamba_expand"] * width
    if "moe_layer_end_index" in tiny:
        tiny["moe_layer_end_index"] = min(tiny["moe_layer_end_index"], layers - 1)
    for name in ("mlp_only_layers", "hybrid_layer_ids"):
        if tiny.get(name):
            tiny[name] = [layer for layer in tiny[name] if layer < layers]
    parameters = tiny.get("rope_parameters") or {}
    for rope in [value for value in parameters.values() if isinstance(value, dict)] or [parameters]:
        _fit_rotary(tiny, rope)


def _fit_rotary(tiny: dict[str, Any], rope: dict[str, Any]) -> None:
    """Fit what rotary embeddings list for each dimension, and where sequences count as long."""
    per_head = tiny.get("head_dim") or tiny["hidden_size"] // tiny["num_attention_heads"]
    half = int(per_head * (rope.get("partial_rotary_factor") or tiny.get("partial_rotary_factor") or 1.0)) // 2
    if rope.get("mrope_section"):
        rope["mrope_section"] = [half - 2 * max(1, half // 3), max(1, half // 3), max(1, half // 3)]
    for name in ("short_factor", "long_factor"):
        if factors := rope.get(name):
            rope[name] = factors[:: max(1, len(factors) // half)][:half]
    if rope.get("llama_4_scaling_beta"):  # queries are scaled by the place of their token, from here on
        rope["original_max_position_embeddings"] = _LIMIT
    if rope.get("rope_type") == "longrope":
        original = rope.get("original_max_position_embeddings") or tiny["original_max_position_embeddings"]
        longest = _LIMIT * math.ceil(tiny["max_position_embeddings"] / original)
        rope["original_max_position_embeddings"] = _LIMIT
        tiny |= {"original_max_position_embeddings": _LIMIT, "max_position_embeddings": longest}


def _is_of_layers(name: str, value: Any, number: int) -> bool:
    """True for a list, or a text that is a pattern, with an entry for each layer."""
    return isinstance(value, list | str if name.endswith("pattern") else list) and len(value) == number


def _num_layers(real: Mapping[str, Any], number: int) -> int:
    """Count the layers that have one whole period of the pattern, after layers that begin otherwise."""
    lists = [value for name, value in real.items() if _is_of_layers(name, value, number)]
    lists = [one for one in lists if len({*map(str, one)}) < number]  # no list of the layers themselves
    first = real.get("first_k_dense_replace") or real.get("moe_layer_start_index") or 0
    step = real.get("decoder_sparse_step") or real.get("interleave_moe_layer_step") or 1
    kinds = [(*(str(one[i]) for one in lists), i < int(first), (i + 1) % step) for i in range(number)]
    for count in range(2, min(number, _MOST_LAYERS) + 1):
        for start in range(count):
            if all(kinds[i] == kinds[i + count - start] for i in range(start, number - count + start)):
                return min(number, 2 * count) if real.get("num_kv_shared_layers") else count
    return next(count for count in range(min(2, number), number + 1) if {*kinds[:count]} == {*kinds})


@torch.no_grad()
def save_tiny(config: Any, path: Path) -> None:
    """Write a model of this config with random weights, of which none is all zeros or ones.

    Products have outputs about as large as their inputs, so that every setting has an effect above the tolerance, and
    states decay slowly: transformers computes a fast decay from differences of large sums.
    """
    torch.manual_seed(0)
    model = model_class(config).from_config(config, dtype=torch.float32)
    weights = model.state_dict()
    for weight in weights.values():
        if weight.ndim > 1:
            weight.normal_(std=weight.shape[-1] ** -0.5)
        elif weight.is_floating_point() and weight.unique().numel() == 1:  # of a norm, or a bias
            weight += 0.1 * torch.randn_like(weight)
        elif weight.is_floating_point():
            weight.normal_(std=0.5)
    for layer in model.modules():  # attention whose scores are scaled by its norms alone would see a single token
        if getattr(layer, "scaling", None) == 1.0 and hasattr(layer, "q_norm"):
            layer.q_norm.weight.div_(layer.head_dim**0.5)
    model.save_pretrained(path)
    if names := family_of(config).published_layers:  # and so is what SGLang reads
        file = path / "config.json"
        written = json.loads(file.read_text(encoding="utf-8"))
        layers = written.get("layers_block_type") or ()
        written |= {"layers_block_type": [names.get(one, one) for one in layers]} if layers else {}
        file.write_text(json.dumps(written, indent=2), encoding="utf-8")
    if family_of(config).has_transposed_experts:  # in files as they are published, though not in transformers' own
        file = path / "model.safetensors"
        files = {name: x.mT.contiguous() if ".experts." in name else x for name, x in load_file(file).items()}
        save_file(files, file, {"format": "pt"})


def save_processor(config: Any, path: Path) -> None:
    """Write a tokenizer and the settings of a processor next to a tiny model with images, which SGLang does not start
    without; nothing for other models."""
    kind = family_of(config).vision
    if kind is None:
        return
    names = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token", "eoa_token")
    backend = Tokenizer(models.WordLevel({f"<{number}>": number for number in range(VOCABULARY)}, unk_token="<0>"))
    special = {name: f"<|{name}|>" for name in names}
    PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=special).save_pretrained(path)
    vision = config.vision_config.to_dict()
    image = {"image_processor_type": _PROCESSORS[kind]} | {
        name: vision[name] for name in ("patch_size", "temporal_patch_size", "pooling_kernel_size") if name in vision
    }
    if kind == "grid":
        image["merge_size"] = vision["spatial_merge_size"]
    written = {"preprocessor_config.json": image}
    if kind == "pooled":
        sounds = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
        video = {"video_processor_type": "Gemma4VideoProcessor"}
        parts = {"feature_extractor": sounds, "image_processor": image, "video_processor": video}
        written = {"processor_config.json": {"processor_class": "Gemma4Processor"} | parts}
    for name, settings in written.items():
        (path / name).write_text(json.dumps(settings), encoding="utf-8")
