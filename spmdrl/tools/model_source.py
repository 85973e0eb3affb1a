"""The sources that `spmdrl model` takes: a directory, a config.json, a name in the hub's cache, or a released model."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spmdrl.config.strict import read_json, shown
from spmdrl.families import without_sounds
from spmdrl.model.supported import refusal_of_config
from spmdrl.preflight.hub import PREFIX, model_folder
from spmdrl.types import UserError

_RELEASED = Path(__file__).with_name("released.toml")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# One entry for each layer, or half the attentions of a model whose layers have two (LongCat).
_COUNT_LAYERS = {"layers_block_type", "hybrid_override_pattern", "num_layers"}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's settings as they were published."""

    name: str
    config: Any  # transformers'
    quantization: str | None = None  # of its files
    weights: Path | None = None  # its directory, where it has one


@cache
def released() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of released settings by short names."""
    return tomllib.loads(_RELEASED.read_text(encoding="utf-8"))


@cache
def shapes() -> Mapping[str, str]:
    """Return the names in that table by those of model directories, such as `Qwen3-4B`; the first of a model is whole,
    and others are its text model."""
    found: dict[str, str] = {}
    for name, row in released().items():
        found.setdefault(row["model"].rpartition("/")[2], name)
    return found


def published_config(shape: str) -> Any:
    """Make transformers' config of a released model, by its directory's name. Raises UserError for another name."""
    if shape not in shapes():
        raise UserError(f'the shape of "{shape}" is not known; name one of {", ".join(shapes())}')
    config = without_sounds(source_of(shapes()[shape]).config)
    if refusal := refusal_of_config(config):
        raise UserError(f"{shape}: {refusal}")
    config.dtype = config.dtype or torch.bfloat16  # as nearly all are published
    return config


def source_of(given: str) -> ModelSource:
    """Read a model's settings. Raises UserError, with what is true, for what no model can be built of."""
    if given in released():
        row = released()[given]
        settings = copy.deepcopy(row["config"])
        for name in row.get("unset", ()):  # TOML has no null
            *tables, last = name.split(".")
            reduce(lambda table, key: table[key], tables, settings)[last] = None
        return ModelSource(given, _config(given, _whole(settings)), row.get("quantization"))
    path = Path(_cached(given) if given.startswith(PREFIX) else given)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"{shown(given)} is no model directory, no config.json, no {PREFIX}ORGANISATION/NAME, and not one of the "
            "models whose released settings are known (spmdrl model --list)"
        )
    raw = read_json(file, dict[str, Any])
    config = _config(given, raw)
    _require_vocabulary(file.with_name("tokenizer.json"), config)
    quantization = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    method = (
        quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization and "unknown"
    )
    return ModelSource(given, config, method, path if path.is_dir() else None)


def _cached(given: str) -> str:
    try:
        return model_folder(given, False)
    except UserError as error:
        raise UserError(f"{shown(given)}: {error}; nothing is downloaded here") from error


def _whole(settings: dict[str, Any]) -> dict[str, Any]:
    """Repeat a pattern of layers that is written once for all layers."""
    text = settings.get("text_config") or settings
    if pattern := text.get("layer_types"):
        number = text["num_hidden_layers"]
        text["layer_types"] = (pattern * (number // len(pattern) + 1))[:number]
    return settings


def _config(given: str, raw: dict[str, Any]) -> Any:
    """Make transformers' config of what config.json says."""
    version, kind = transformers.__version__, raw.get("model_type")
    if kind is None:
        raise UserError(
            f"{shown(given)}: its config.json does not say model_type; take the one published with its weights"
        )
    if kind not in CONFIG_MAPPING:
        own = next(iter(raw.get("architectures") or ()), None)
        same = [name for name, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if model == own]
        if same:
            hint = f'its class {own} is there as model_type = "{same[0]}": write that into config.json'
        elif raw.get("auto_map"):
            hint = (
                "its files bring code of their own, and running it (trust_remote_code) would be code that nobody here "
                "has read; wait for transformers to have it"
            )
        else:
            newer = raw.get("transformers_version")
            hint = f"it was written by {newer}: install that or a newer one" if newer else "install a newer one"
        raise UserError(f"{shown(given)}: transformers {version} does not know model_type = {kind!r}; {hint}")
    text = raw.get("text_config") or raw
    known = {*text, *raw} | ({"num_hidden_layers"} if _COUNT_LAYERS & text.keys() else set())
    if missing := [name for name in _SIZES if name not in known]:
        raise UserError(
            f"{shown(given)}: its config.json does not say {', '.join(missing)}, so the shapes of its weights are not "
            "known; take the config.json that was published with them"
        )
    settings = {name: value for name, value in raw.items() if name != "quantization_config"}
    try:
        return CONFIG_MAPPING[kind].from_dict(settings)
    except Exception as error:  # transformers raises many types for a bad config.json
        raise UserError(
            f"{shown(given)}: transformers {version} does not take it: {' '.join(str(error).split())}"
        ) from error


def _require_vocabulary(file: Path, config: Any) -> None:
    """Raise UserError for a tokenizer whose ids the embedding does not have."""
    if not file.is_file():
        return
    rows = config.get_text_config().vocab_size
    if (most := max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values(), default=0)) >= rows:
        raise UserError(
            f"{shown(file)} has token ids up to {most}, and the embedding has {rows} rows (vocab_size); take the "
            "tokenizer that belongs to the model, or make its embedding larger"
        )
