"""Checkpoints in MXFP4 and FP8, made whole: what transformers makes of them, and what is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from spmdrl.model.load import load_model_config, load_plain
from spmdrl.model.weight_files import stored_weights, weight_file_problems
from spmdrl.tools.dequantize import main
from tests.helpers.configs import model_config
from tests.helpers.few_bits import in_fp8, published, save_deepseek_in_fp8, save_gpt_oss_in_mxfp4
from tests.helpers.models import save_llama


def test_mxfp4_becomes_what_transformers_makes_of_it(tmp_path: Path) -> None:
    source = save_gpt_oss_in_mxfp4(tmp_path / "source")
    assert main([source, str(tmp_path / "whole")]) == 0
    load_model_config(model_config(str(tmp_path / "whole")))  # not refused
    found, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    expected = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True))
    read = load_plain(model_config(source), torch.float32)
    assert not hasattr(read.config, "quantization_config")
    for name, weight in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), weight.float()), name
        assert torch.equal(read.get_parameter(name), weight.float()), name


@pytest.mark.parametrize("settings", [{"weight_block_size": [32, 32]}, {}], ids=["blocks", "without their size"])
def test_fp8_is_multiplied_by_its_scales(
    tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(save_llama(tmp_path / "source"))
    tensors = published(source, in_fp8, {"quant_method": "fp8"} | settings)
    arguments = [str(source), str(tmp_path / "whole")]
    if not settings:
        assert main(arguments) == 2
        assert "has no weight_block_size" in capsys.readouterr().err
        return
    assert main(arguments) == 0
    assert "14 weights in bfloat16" in capsys.readouterr().out
    load_model_config(model_config(str(tmp_path / "whole")))
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    for name, weight in found.items():
        if weight.dtype != torch.bfloat16:
            assert torch.equal(weight, tensors[name])
            continue
        scale = tensors[f"{name}_scale_inv"]
        rows, columns = (torch.arange(size) // 32 for size in weight.shape)
        assert torch.equal(weight, (tensors[name].float() * scale[rows][:, columns]).bfloat16())


def test_what_is_not_quantized_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([save_llama(tmp_path / "source"), str(tmp_path / "whole")]) == 2
    assert "is not quantized: its config.json has no quantization_config" in capsys.readouterr().err


@pytest.mark.parametrize("save", [save_gpt_oss_in_mxfp4, save_deepseek_in_fp8])
def test_a_part_that_is_read_is_that_part_of_the_whole(tmp_path: Path, save: Callable[[Path], str]) -> None:
    for name, weight in stored_weights(save(tmp_path)).items():
        whole, shape = weight[...], weight.get_shape()
        assert list(whole.shape) == shape, name
        for start in (0, 3):
            part = tuple(slice(min(start, size - 1), max(1, size - 5)) for size in shape)
            assert torch.equal(weight[part], whole[part]), name


def test_a_weight_without_its_scales_is_named_before_the_run(tmp_path: Path) -> None:
    path = save_deepseek_in_fp8(tmp_path)
    assert not list(weight_file_problems(path))
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.o_proj.weight_scale_inv"
    save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file, {"format": "pt"})
    (sentence,) = weight_file_problems(path)
    assert sentence == f'model.path = "{path}": there are no scales {name} for a weight of few bits'
