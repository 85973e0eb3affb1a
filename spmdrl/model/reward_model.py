"""Reward models: a decoder with a head of one label, as transformers' classifiers of sequences have it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from spmdrl.config import ModelConfig
from spmdrl.dist.mesh import ModelMeshes
from spmdrl.model.kernels import Kernel
from spmdrl.model.load import Role, drop_head, load_packed, model_without_memory
from spmdrl.model.policy import RewardModel, ValueHead

HEAD = "score.weight"  # [1, D]


def reward_model_problems(model_config: Any, cfg: ModelConfig) -> Iterator[str]:
    """Yield a sentence when transformers could not load the model with a head of one label; takes no memory."""
    model = model_without_memory(model_config, cfg)
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_config.model_type)
    ours = {*_with_head(model).state_dict()}
    theirs: set[str] = set()
    if name is not None:
        with torch.device("meta"):
            theirs = {*AutoModelForSequenceClassification.from_config(_labelled(model_config)).state_dict()}
    if ours != theirs:
        reason = f"{name} of transformers has other weights" if name else "transformers has no such model"
        yield (
            f'model.path = "{cfg.path}": {model_config.model_type} cannot have a head of one label at the last token: '
            f"{reason}"
        )


def load_reward_model(
    cfg: ModelConfig, meshes: ModelMeshes, *, role: Role, seed: int | None, kernel: Kernel | None = None
) -> RewardModel:
    """Load the directory's model as a reward model, sharded like a policy.

    Where it has no head of one label, that one begins at random numbers which follow from `seed`; with None, UserError
    names the weights that are missing.
    """

    def build(model: PreTrainedModel, chosen: Kernel) -> RewardModel:
        model.config = _labelled(model.config)
        return RewardModel(
            _with_head(model),
            kernel=chosen,
            context=meshes.cp if meshes.cp.size() > 1 else None,
            context_style=meshes.cp_style,
        )

    def start(model: PreTrainedModel) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0 if seed is None else seed)
        text = model.config.get_text_config()
        return {HEAD: torch.randn(1, text.hidden_size, generator=generator) * text.initializer_range}

    return load_packed(cfg, meshes, build, role=role, kernel=kernel, start=start if seed is not None else None)


def _with_head(model: PreTrainedModel) -> PreTrainedModel:
    """Replace a model's language head by one of one label, without memory."""
    drop_head(model)
    model.score = ValueHead(model.config.get_text_config().hidden_size, torch.device("meta"))
    return model


def _labelled(model_config: Any) -> Any:
    """Return the config of the model with a head of one label, as its files have it."""
    config = copy.deepcopy(model_config)
    config.num_labels = 1
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    config.architectures = [name] if name else config.architectures
    return config
