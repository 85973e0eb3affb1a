"""Models that SGLang computes otherwise than transformers: hybrids with recurrent layers, and rotary embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spmdrl.config import Config
from spmdrl.config.strict import read_json
from spmdrl.families import family_of
from spmdrl.model.few_bits import quantization_of
from spmdrl.model.fp8 import BLOCK
from spmdrl.model.layer_kinds import RECURRENT, recurrent_layers

# Models of which some layers have a state instead of keys and values, as SGLang wants them (Qwen3-Next, LFM2).


_ATTENTION = "full_attention"
_CHECKED_TOO_EARLY = ("yarn", "llama3", "longrope")  # rotary types whose settings depend on other sizes


def is_hybrid(model_config: Any) -> bool:
    """Return True when some layers of the model have a state."""
    return bool(recurrent_layers(model_config.get_text_config()))


def has_delta_nets(model_config: Any) -> bool:
    """Return True when some layers of the model are gated delta nets."""
    return is_hybrid(model_config) and hasattr(model_config.get_text_config(), "linear_num_key_heads")


def attention_without_packages(model_config: Any) -> str:
    """Return the attention backend of SGLang that needs no kernels beyond torch and Triton. It takes Triton's for no
    model whose first layer may have no attention."""
    return "torch_native" if family_of(model_config.get_text_config()).has_short_convs else "triton"


def expert_problems(model_dir: str, model_config: Any) -> Iterator[str]:
    """Yield a sentence when not all layers have experts by settings that SGLang's classes for Qwen do not read."""
    text = model_config.get_text_config()
    if getattr(text, "mlp_only_layers", None) or getattr(text, "decoder_sparse_step", 1) != 1:
        yield (
            f'model.path = "{model_dir}" has layers without experts beside layers with them, and SGLang\'s '
            f'{text.model_type} has experts in every layer; set rollout.engine = "torch"'
        )


def hybrid_problems(cfg: Config, model_config: Any, *, device_type: str) -> Iterator[str]:
    """Yield a sentence for each reason why SGLang could not run such a model; none for other models."""
    if is_hybrid(model_config) and cfg.sends_adapters:
        yield (
            f"adapters of {model_config.get_text_config().model_type} were not tried with SGLang; set lora.merge = "
            "true, which sends merged weights"
        )
    if not has_delta_nets(model_config):
        return
    model_config = model_config.get_text_config()
    if device_type == "cpu":
        yield (
            f'model.path = "{cfg.model.path}" has gated delta nets, for which SGLang has no kernels on a CPU; set '
            'rollout.engine = "torch"'
        )
    if attention_interval(model_config) is None:
        yield (
            f'model.path = "{cfg.model.path}" has the layers {", ".join(model_config.layer_types)}, but SGLang knows '
            'only models in which every n-th layer is one of full attention; set rollout.engine = "torch"'
        )
    heads = model_config.linear_num_key_heads
    if heads % cfg.rollout.tp_size:
        possible = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        yield (
            f"rollout.tp_size = {cfg.rollout.tp_size} does not divide the {heads} key heads of the model's gated delta "
            f"nets; set it to one of {possible}"
        )
    if family_of(model_config).sglang.checks_rotary_early:
        yield from _rotary_problems(cfg.model.path, model_config.rope_parameters["rope_type"])


def _rotary_problems(model_dir: str, rope_type: str) -> Iterator[str]:
    """Yield a sentence when config.json has rotary settings under their newer name, which SGLang's class hands to
    transformers' checks before it has the sizes that these compare them with."""
    if rope_type in _CHECKED_TOO_EARLY and "rope_parameters" in read_json(
        Path(model_dir, "config.json"), dict[str, Any]
    ):
        yield (
            f'model.path = "{model_dir}" has rope_parameters of the type "{rope_type}" in its config.json, with which '
            "SGLang's qwen3_next does not start; write them there as rope_scaling, with rope_theta and "
            'partial_rotary_factor beside it, as older checkpoints do, or set rollout.engine = "torch"'
        )


def attention_interval(model_config: Any) -> int | None:
    """Return n where every n-th layer, and no other, is one of full attention; None when there is no such n."""
    layers = list(model_config.layer_types)
    if _ATTENTION not in layers:
        return None
    interval = layers.index(_ATTENTION) + 1
    expected = [RECURRENT if (number + 1) % interval else _ATTENTION for number in range(len(layers))]
    return interval if layers == expected else None


def hybrid_arguments(model_config: Any) -> dict[str, Any]:
    """Return SGLang's arguments for a hybrid or shared experts, on top of which the user's come; none for others."""
    found: dict[str, Any] = {}
    if is_hybrid(model_config):
        found["mamba_ssm_dtype"] = "float32"  # that of transformers' recurrence
    if has_delta_nets(model_config) or getattr(model_config.get_text_config(), "n_shared_experts", None):
        found["disable_shared_experts_fusion"] = True  # they stay apart, as on a CPU: `layout.py` knows one layout
    return found


def config_overrides(cfg: Config, model_config: Any) -> dict[str, Any]:
    """Return the argument by which SGLang reads a model's config as the trainer does; none where it does so anyway."""
    known = _hybrid_settings(model_config) if has_delta_nets(model_config) else _settings_by_other_names(model_config)
    if quantization_of(cfg.model.path):  # weights of few bits are sent as the numbers that they encode
        known["quantization_config"] = None
    if cfg.rollout.quantization is not None:
        # What a checkpoint in e4m3 says, by which SGLang makes its layers: a weight and `weight_scale_inv` each.
        blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        known["quantization_config"] = blocks
    if not known:
        return {}
    given = json.loads(cfg.rollout.sglang.get("json_model_override_args", "{}"))
    return {"json_model_override_args": json.dumps(known | given)}


def _hybrid_settings(model_config: Any) -> dict[str, Any]:
    """Return the settings of a model with gated delta nets by the names of older checkpoints, which transformers no
    longer writes, and which SGLang's own classes for these configs know."""
    text = model_config.get_text_config()
    # Where transformers gives these models positions of three kinds, they always alternate.
    rotary = text.rope_parameters | ({"mrope_interleaved": True} if "mrope_section" in text.rope_parameters else {})
    known: dict[str, Any] = {
        "full_attention_interval": attention_interval(text),
        "rope_parameters": rotary,
        "rope_theta": rotary["rope_theta"],
        "partial_rotary_factor": rotary.get("partial_rotary_factor", 1.0),
    }
    if text is not model_config:  # it reads images, and its tower is that of Qwen3-VL without levels
        known = {"text_config": known, "vision_config": {"deepstack_visual_indexes": []}}
    return known


def _settings_by_other_names(model_config: Any) -> dict[str, Any]:
    """Return settings that SGLang reads by another name, and that without it are those of the first release: the
    length from which on Ministral 3 scales queries by the place of their token, Nemotron-H's groups, and the activation
    of Gemma 2."""
    rope, mamba = getattr(model_config, "rope_parameters", None) or {}, family_of(model_config).mamba2
    found: dict[str, Any] = {}
    if rope.get("llama_4_scaling_beta"):
        found["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if mamba is not None and mamba.groups == "n_groups":
        found["mamba_n_groups"] = model_config.n_groups
    if family_of(model_config).caps_scores:
        found["hidden_act"] = model_config.hidden_activation
    return found


def hybrid_environment(model_config: Any, *, dtype: str) -> dict[str, str]:
    """Return the variables of the engine's processes for such a model, which computes in `dtype`; none for others.

    The state of a convolution is its last inputs. SGLang rounds them to bfloat16 whatever they are: in float32 that
    costs 1e-4 nats of every token.
    """
    return {"SGLANG_MAMBA_CONV_DTYPE": dtype} if is_hybrid(model_config) else {}


# Rotary embeddings that SGLang computes otherwise than transformers.


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
        ours = ROPE_INIT_FUNCTIONS["longrope"](text)[1]
        if family_of(text).reads_short_factors_only:
            ours = rope["short_mscale"]
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
