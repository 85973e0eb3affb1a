"""The models that can be trained here, and why others cannot; docs/models.md shows the same as a table."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from spmdrl.families import LogitScale, family_of, vision_family
from spmdrl.model.layer_kinds import BOTH_KINDS, OTHER_KINDS, RECURRENT_KINDS
from spmdrl.model.recurrent import restartable_layers
from spmdrl.model.trunk import Trunk, has_language_model

# A setting by which families cap attention scores; others have it and never use it.
_CAP = "attn_logit_softcapping"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_INDEXED = (
    "where an indexer chooses the tokens that are seen: no kernel here takes its choice, and a policy's loss would not "
    "train it; train a model whose layers see all tokens, such as DeepSeek V3 or GLM-4.7-Flash"
)
_REASONS = {
    "indexed_attention": _INDEXED,
    "deepseek_sparse_attention": _INDEXED,  # its name in older versions of transformers
    "heavily_compressed_attention": "which see summaries of several tokens: in packed sequences, these would mix those "
    "of neighbours; train a model whose layers see tokens themselves, such as DeepSeek V3",
}
_KERNELS_WITH_SINKS = {"auto", "varlen", "sdpa"}  # and with blocks whose tokens see each other


def refusal_of_config(config: Any) -> str | None:
    """Give the reason why a model with this config cannot be trained here; None when the config shows none."""
    text = config.get_text_config()
    if text is not config and vision_family(config) is None:
        way_out = (
            "save its text model by itself with python -m spmdrl.tools.text_model, and train that"
            if has_language_model(text.model_type)
            else "transformers has no text model for it"
        )
        more = "hears sounds" if _hears(config) else "is a model of more than text"
        return f"{config.model_type} {more}, and can be trained here only on text; {way_out}"
    if (cap := getattr(text, _CAP, None)) and not family_of(config).caps_scores:
        return f"{config.model_type} with {_CAP} = {cap} is not supported"
    try:
        LogitScale.of(config)
    except ValueError as error:
        return str(error)
    return None


def _share_weights(model: PreTrainedModel) -> bool:
    """True where a weight belongs to several layers."""
    names = {*(model._no_split_modules or ())}
    layers = [module for module in Trunk(model).decoder.modules() if type(module).__name__ in names]
    weights = [id(parameter) for layer in layers for parameter in layer.parameters()]
    return len({*weights}) < len(weights)


def _hears(config: Any) -> bool:
    """True for a model with a tower for sounds."""
    parts = (config, getattr(config, "thinker_config", None))
    return any(getattr(part, "audio_config", None) is not None for part in parts)


def refusal_of_model(model: PreTrainedModel, attention: str) -> str | None:
    """Give the reason why this model cannot be trained with `model.attention` = `attention`; None when it can.

    The model may be on the meta device.
    """
    name, text = type(model).__name__, model.config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", None)
    layers = list(getattr(text, "layer_types", None) or ())[:num_layers]
    if unknown := set(layers) - _ATTENTION_LAYERS - RECURRENT_KINDS - BOTH_KINDS - OTHER_KINDS:
        reason = next((_REASONS[kind] for kind in sorted(unknown) if kind in _REASONS), "which are not supported")
        return f"{name} has layers of type {', '.join(sorted(unknown))}, {reason}"
    if _share_weights(model):
        return (
            f"{name} has layers that share their weights, and a layer's weights are sharded and gathered with that "
            "layer alone; train a model whose layers have weights of their own, such as Nemotron-H or Granite 4"
        )
    num_recurrent = sum(kind in RECURRENT_KINDS | BOTH_KINDS for kind in layers)
    if (model._is_stateful or num_recurrent) and not restartable_layers(model) == num_recurrent > 0:
        return f"{name} has recurrent layers whose state would leak from one packed sequence into the next"
    if not (model._supports_attention_backend or num_recurrent):
        return f"{name} does not support transformers' attention interface, so sequences cannot be packed"
    if any(getattr(module, "is_causal", True) is False for module in Trunk(model).decoder.modules()):
        return f"{name} lets tokens see those that come after them (bidirectional attention)"
    family = vision_family(model.config)
    if attention not in _KERNELS_WITH_SINKS and family is not None and family.sees_whole_images:
        return (
            f'in {name} the tokens of an image see each other, which model.attention = "{attention}" does not support; '
            'set it to "auto", "varlen" or "sdpa"'
        )
    if attention not in _KERNELS_WITH_SINKS and any(hasattr(module, "sinks") for module in model.modules()):
        return (
            f'{name} has attention sinks, which model.attention = "{attention}" does not support; '
            'set it to "auto", "varlen" or "sdpa"'
        )
    return None
