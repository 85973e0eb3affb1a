"""The plan of a run whose model looks at images: what is frozen has no state, and tokens do not go through a tower."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from spmdrl.config import ModelConfig
from spmdrl.memory.device import GIB
from spmdrl.memory.images import engine_bytes, pass_bytes, saved_bytes
from spmdrl.model.sharding import checkpoint_layers
from spmdrl.model.trunk import Trunk
from spmdrl.preflight.checks import vision_problems
from spmdrl.preflight.forecast import Model, forward_flops, predict, tower_of
from tests.helpers.configs import minimal_config
from tests.helpers.live import Watch
from tests.helpers.models import config_of, save_gemma3
from tests.helpers.vision_models import (
    picture,
    save_gemma3_vl,
    save_gemma4_vl,
    save_qwen2_5_vl,
    save_qwen3_5_vl,
    save_qwen3_vl,
)

TOWER = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.embed_vision.")


@pytest.mark.parametrize("save", [save_qwen3_vl, save_gemma3_vl])
def test_a_frozen_tower_has_weights_and_nothing_more(tmp_path: Path, save) -> None:
    path = save(tmp_path)
    config = AutoConfig.from_pretrained(path)
    cfg, predictions = minimal_config(model={"path": path}), {}
    for name, freeze in (("frozen", None), ("trained", ())):
        model = Model.read(config, ModelConfig(path=path, freeze=freeze))
        predictions[name] = predict(cfg, model, num_ranks=1, device_bytes=80 * GIB, on_gpu=True)
    in_tower = sum(math.prod(shape) for name, shape in model.shapes.items() if name.startswith(TOWER))
    whole = sum(map(math.prod, model.shapes.values()))
    frozen, trained = predictions["frozen"].rank, predictions["trained"].rank
    assert (frozen.size.stepped, trained.size.stepped) == (whole - in_tower, whole)
    assert frozen.memory.weights == trained.memory.weights == 4 * whole
    assert (frozen.memory.optimizer, frozen.memory.gradients) == (8 * (whole - in_tower), 4 * (whole - in_tower))
    assert frozen.size.root == whole - in_tower - frozen.size.num_layers * frozen.size.largest_layer
    phases = {phase.name: phase for phase in predictions["frozen"].phases}
    assert phases["images"].device["gathered"] == 2 * (frozen.size.root + in_tower)
    levels, text = 3 if save is save_qwen3_vl else 1, config.text_config.hidden_size
    assert phases["save"].host["features of images"] == 2 * 8 * 8 * levels * text  # of 8 prompts with 8 tokens
    looking = {phase.name: phase for phase in predictions["trained"].phases}
    assert "images" not in looking and trained.tower is not None
    # A micro-batch of 64 tokens has 4 sequences of 16, of which 8 are prompts; a step has 8 prompts.
    patches = 4 * 8 * trained.tower.patches_per_token
    waiting = saved_bytes(trained.tower, level="none", every_layers=1, num_patches=patches, compute_bytes=2)
    assert looking["forward-backward"].device["activations of images"] == waiting
    assert looking["save"].host["pixels of images"] == 2 * 4 * patches * trained.tower.patch_values
    assert not {"activations of images", "pixels of images"} & {
        *phases["forward-backward"].device,
        *phases["save"].host,
    }
    in_blocks = trained.tower.num_blocks * trained.tower.block_parameters
    assert 0 < in_blocks < in_tower


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "save",
    [
        *(save_qwen3_vl, save_gemma4_vl),
        *(pytest.param(save, marks=pytest.mark.slow) for save in (save_qwen2_5_vl, save_qwen3_5_vl, save_gemma3_vl)),
    ],
)
def test_what_a_trained_tower_keeps_is_what_the_formula_says(
    tmp_path: Path, save: Callable[..., str], dtype: torch.dtype
) -> None:
    path = save(tmp_path)
    config = AutoConfig.from_pretrained(path)
    shown = [picture(path, number) for number in range(4)]
    patches = sum(math.prod(one.grid) for one in shown)
    if save is save_gemma4_vl:  # all have as many as the largest
        patches = len(shown) * max(math.prod(one.grid) for one in shown)
    tower = tower_of(config, Model.read(config, ModelConfig(path=path)).shapes)
    assert tower is not None
    for level, every_layers in (("none", 1), ("full", 1), ("selective", 1), ("full", 2)):
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
        trunk = Trunk(model)
        if level != "none":
            checkpoint_layers(model, trunk.tower_blocks, recomputed=level, every_layers=every_layers)
        with Watch() as watch:
            features = trunk.encode([one.pixels for one in shown], [one.grid for one in shown])
            measured = watch.live_bytes
        sizes = {"num_patches": patches, "compute_bytes": dtype.itemsize}
        predicted = saved_bytes(tower, level=level, every_layers=every_layers, **sizes)
        assert 0.85 < predicted / measured < 1.15, (level, every_layers, predicted / measured)
        del features


@pytest.mark.parametrize("freeze", [None, ()])
def test_the_torch_engine_holds_features_and_looks(tmp_path: Path, freeze: tuple[str, ...] | None) -> None:
    """Also where the trainer's tower is trained: 16 rollouts of prompts with 8 tokens."""
    path = save_qwen3_vl(tmp_path)
    config, found = AutoConfig.from_pretrained(path), {}
    for patches in (100, 300):
        cfg = minimal_config(model={"path": path}, rollout={"engine": "torch"}, pack={"max_patches_per_pass": patches})
        predicted = predict(
            cfg, Model.read(config, ModelConfig(path=path, freeze=freeze)), num_ranks=1, device_bytes=GIB, on_gpu=True
        )
        (rollout,) = [phase for phase in predicted.phases if phase.name == "rollout"]
        assert predicted.rank.tower is not None
        one_pass = pass_bytes(predicted.rank.tower, num_patches=patches, compute_bytes=2)
        found[patches] = one_pass, rollout.device["engine"]
        features = engine_bytes(predicted.rank.tower, cfg, num_rows=16, compute_bytes=2) - one_pass
        assert features == 2 * 16 * 8 * 3 * config.text_config.hidden_size
    assert found[300][1] - found[100][1] == found[300][0] - found[100][0] > 0


def test_tokens_cost_what_they_cost_the_model_of_text(tmp_path: Path) -> None:
    found = []
    for path in (save_gemma3_vl(tmp_path / "vl"), save_gemma3(tmp_path / "text", vocab_size=98)):
        config = AutoConfig.from_pretrained(path)
        found.append(forward_flops(config, Model.read(config, ModelConfig(path=path)).shapes))
    assert found[0] == found[1]


def test_what_a_tower_does_not_allow_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_gemma3_vl(tmp_path / "vl"))
    cfg = minimal_config(parallel={"cp": 2}, critic={"path": "other"}, advantage={"estimator": "gae"})
    cp, critic = vision_problems(cfg, config)
    assert cp.startswith('parallel.cp_style = "all_gather", but the tokens of an image of gemma3 see each other')
    assert cp.endswith('set it to "ulysses", or cp = 1')
    assert not list(vision_problems(minimal_config(parallel={"cp": 2, "cp_style": "ulysses"}), config))
    assert critic.startswith('critic.path = "other", but the critic sees images as the tower of model.path does')
    exact = minimal_config().model_copy(update={"true_on_policy": True})
    assert "the tower of gemma3 does not compute the same bits" in next(vision_problems(exact, config))
    assert not list(vision_problems(exact, AutoConfig.from_pretrained(save_gemma3(tmp_path / "text"))))


@pytest.mark.parametrize("name", ["deepseek_v3", "nemotron_h", "mixtral"])
def test_only_the_experts_that_a_token_goes_to_count(name: str) -> None:
    """Whatever a config calls their number."""
    found = []
    for number in (4, 16):
        config = config_of(name, n_routed_experts=number, num_local_experts=number, num_experts=number)
        found.append(forward_flops(config, Model.read(config, ModelConfig(path="model")).shapes)[0])
    assert found[0] < found[1] < 1.1 * found[0]  # more by the router alone
