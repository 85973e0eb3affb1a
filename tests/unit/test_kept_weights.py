"""Weights that a model's architecture leaves out of its files are found, told and read."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from spmdrl.model.load import model_without_memory
from spmdrl.model.weight_files import kept_line, kept_names, read_kept
from tests.helpers.configs import model_config
from tests.helpers.models import save_qwen3, save_qwen3_5


def test_layers_for_multi_token_prediction_are_found_and_told(tmp_path: Path) -> None:
    path = save_qwen3_5(tmp_path / "model")
    model = model_without_memory(AutoConfig.from_pretrained(path), model_config(path))
    assert kept_names(model, path) == {} and kept_line({}) is None
    more = {"mtp.norm.weight": torch.randn(3), "mtp.layers.0.weight": torch.randn(2, 3).half()}
    file = Path(path, "model.safetensors")
    save_file(load_file(file) | more, file, {"format": "pt"})
    names = kept_names(model, path)
    assert names == dict.fromkeys(more, file)
    read = read_kept(names)
    assert read.keys() == more.keys() and all(torch.equal(read[name], more[name]) for name in more)
    line = kept_line(names)
    assert line is not None and line.startswith("2 weights of model.path are no part of what is trained")
    assert "mtp.layers.0.weight" in line
    other = save_qwen3(tmp_path / "other")
    assert kept_names(model_without_memory(AutoConfig.from_pretrained(other), model_config(other)), other) == {}
