"""Reward models: a decoder with a head of one label, as transformers' classifiers of sequences have it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from spmdrl.config import ModelConfig
from spmdrl.config.model import FrozenModelConfig
from spmdrl.dist.mesh import ModelMeshes
from spmdrl.model.context import ContextRanks
from spmdrl.model.kernels import Kernel
from spmdrl.model.load import drop_head, load_packed, model_without_memory, role_of
from spmdrl.model.policy import RewardModel, ValueHead
from spmdrl.types import UserError

HEAD = "score.weight"  # [1, D]


def reward_model_problems(model_config: Any, cfg: ModelConfig) -> Iterator[str]:
    """Yield a sentence when transformers could not load the model with a head of one label; takes no memory."""
    model = copy.deepcopy(model_without_memory(model_config, cfg))
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


def load_reward_model(cfg: ModelConfig, meshes: ModelMeshes, *, seed: int, kernel: Kernel | None = None) -> RewardModel:
    """Load the directory's model to be trained as a reward model of one label, sharded like a policy.

    Where it has no such head, the head begins at random numbers which follow from `seed`.
    """

    def build(model: PreTrainedModel, chosen: Kernel) -> RewardModel:
        model.config = _labelled(model.config)
        return RewardModel(_with_head(model), kernel=chosen, context=ContextRanks.of(meshes))

    def start(model: PreTrainedModel) -> dict[str, Tensor]:
        generator, text = torch.Generator().manual_seed(seed), model.config.get_text_config()
        return {HEAD: torch.randn(1, text.hidden_size, generator=generator) * text.initializer_range}

    return load_packed(cfg, meshes, build, role="trained", kernel=kernel, start=start)


def load_scorer(
    cfg: ModelConfig, meshes: ModelMeshes, term: FrozenModelConfig, *, num_labels: int, label: int
) -> RewardModel:
    """Load a directory's reward model to be asked; between forward passes its shards are where `term` says."""

    def build(model: PreTrainedModel, chosen: Kernel) -> RewardModel:
        headed = _with_head(model, num_labels)
        return RewardModel(headed, kernel=chosen, label=label, context=ContextRanks.of(meshes))

    return load_packed(cfg, meshes, build, role=role_of(term), kernel=None)


def num_labels_of(path: str) -> int:
    """Count the labels of the reward model in a directory. Raises UserError when its weights have no such head."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            if HEAD in weights.keys():  # noqa: SIM118
                return int(weights.get_slice(HEAD).get_shape()[0])
    raise UserError(
        f'model.path = "{path}" is no reward model: its weights have no {HEAD}, the head of a classifier of sequences; '
        "train one by spmdrl.pairs"
    )


def _with_head(model: PreTrainedModel, num_labels: int = 1) -> PreTrainedModel:
    """Replace a model's language head by one of labels, without memory."""
    drop_head(model)
    model.score = ValueHead(model.config.get_text_config().hidden_size, torch.device("meta"), num_labels)
    return model


def _labelled(model_config: Any) -> Any:
    """Return the config of the model with a head of one label, as its files have it."""
    config = copy.deepcopy(model_config)
    config.num_labels = 1
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    config.architectures = [name] if name else config.architectures
    return config
