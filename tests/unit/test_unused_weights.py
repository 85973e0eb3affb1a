"""Weights that a model's architecture leaves out of its files are found, told and read."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from spmdrl.model.load import load_model_config, model_without_memory
from spmdrl.model.weight_files import missing_weight_problems, unused_line, unused_names, unused_parts
from tests.helpers.configs import model_config
from tests.helpers.models import save_other, save_qwen3, save_qwen3_5
from tests.helpers.vision_models import save_gemma4_that_hears


def test_layers_for_multi_token_prediction_are_found_and_told(tmp_path: Path) -> None:
    path = save_qwen3_5(tmp_path / "model")
    model = model_without_memory(AutoConfig.from_pretrained(path), model_config(path))
    assert unused_names(model, path) == [] and unused_line([]) is None
    more = {"mtp.norm.weight": torch.randn(3), "mtp.layers.0.weight": torch.randn(2, 3).half()}
    file = Path(path, "model.safetensors")
    save_file(load_file(file) | more, file, {"format": "pt"})
    names = unused_names(model, path)
    assert names == sorted(more)
    read = {name: weight[...] for name, weight in unused_parts(model, path).items()}
    assert read.keys() == more.keys() and all(torch.equal(read[name], more[name]) for name in more)
    line = unused_line(names)
    assert line is not None and line.startswith("2 weights of model.path are no part of what is trained")
    assert "mtp.layers.0.weight" in line
    other = save_qwen3(tmp_path / "other")
    assert unused_names(model_without_memory(AutoConfig.from_pretrained(other), model_config(other)), other) == []


def test_weights_that_no_parameter_takes_and_no_export_has_are_refused(tmp_path: Path) -> None:
    path = save_qwen3_5(tmp_path)
    model = model_without_memory(AutoConfig.from_pretrained(path), model_config(path))
    file, needed = tmp_path / "model.safetensors", [name for name, _ in model.named_parameters()]
    whole = load_file(file)
    for more in ({}, {"mtp.norm.weight": torch.randn(3)}, {"model.layers.9.a.weight": torch.randn(3)}):
        save_file(whole | more, file, {"format": "pt"})
        assert not list(missing_weight_problems(path, model, needed))
    save_file(whole | {"score.weight": torch.randn(3), "model.layers.0.mlp.z.bias": torch.ones(1)}, file)
    (sentence,) = missing_weight_problems(path, model, needed)
    assert "holds 2 weights that no parameter of Qwen3_5ForCausalLM takes" in sentence
    assert "the first is model.layers.0.mlp.z.bias" in sentence
    assert not list(missing_weight_problems(path, model, needed, may_have_others=True))


def test_layers_of_a_model_are_trained_whatever_its_class_leaves_out_of_others(tmp_path: Path) -> None:
    """transformers' class for GLM-4.5 names layer 46, which is one more than Air has, and one of GLM-4.5's own."""
    path = save_other("glm4_moe", tmp_path, num_hidden_layers=48)
    names = ["model.layers.48.eh_proj.weight", "model.layers.48.mlp.experts.0.up_proj.weight"]
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.randn(2) for name in names}, file, {"format": "pt"})
    model = model_without_memory(AutoConfig.from_pretrained(path), model_config(path))
    assert unused_names(model, path) == names


def test_keys_of_layers_that_share_them_and_towers_for_sounds_are_no_part_of_the_model(tmp_path: Path) -> None:
    """transformers drops the former, which the files of Gemma 4 E2B may hold."""
    path = save_gemma4_that_hears(tmp_path)
    model = model_without_memory(load_model_config(model_config(path)), model_config(path))
    file, needed = tmp_path / "model.safetensors", [name for name, _ in model.named_parameters()]
    names = [f"model.language_model.layers.{part}.weight" for part in ("2.self_attn.k_norm", "3.self_attn.k_proj")]
    whole = load_file(file) | {name: torch.randn(2) for name in names}
    save_file(whole, file, {"format": "pt"})
    of_sounds = {name for name in whole if name.startswith(("model.audio_tower.", "model.embed_audio."))}
    assert of_sounds and unused_names(model, path) == sorted({*names} | of_sounds)
    assert not list(missing_weight_problems(path, model, needed))
