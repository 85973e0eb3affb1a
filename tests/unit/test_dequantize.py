"""Checkpoints in MXFP4 and FP8, made whole: what transformers makes of them, and what is trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from spmdrl.model.load import load_model_config
from spmdrl.tools.dequantize import main
from tests.helpers.configs import model_config
from tests.helpers.models import save_gpt_oss, save_llama

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_mxfp4(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss's experts as they are published: the nearest numbers of 4 bits, in blocks of 32 with an exponent."""
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            made[name] = weight
            continue
        blocks = weight.transpose(1, 2).unflatten(2, (-1, 32)).float()
        exponents = blocks.abs().amax(-1).log2().floor() - 2
        nearest = ((blocks / exponents.exp2().unsqueeze(-1)).unsqueeze(-1) - FP4).abs().argmin(-1).to(torch.uint8)
        made[f"{name}_blocks"] = nearest[..., 0::2] | (nearest[..., 1::2] << 4)
        made[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    return made


def in_fp8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Linear layers as DeepSeek's are published: float8, with a scale for each block of 32 times 32."""
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            made[name] = weight
            continue
        rows, columns = (-(-size // 32) for size in weight.shape)
        scale = 0.01 + torch.rand(rows, columns)
        spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[: weight.shape[0], : weight.shape[1]]
        made[name], made[f"{name}_scale_inv"] = (weight / spread).to(torch.float8_e4m3fn), scale
    return made


def published(
    path: Path, convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]], settings: dict[str, Any]
) -> dict[str, Tensor]:
    """Convert a model's files in their place; returns its tensors."""
    tensors = convert(load_file(path / "model.safetensors"))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return tensors


def test_mxfp4_becomes_what_transformers_makes_of_it(tmp_path: Path) -> None:
    source = Path(save_gpt_oss(tmp_path / "source", hidden_size=64, intermediate_size=64, num_local_experts=4))
    published(source, in_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]})
    assert main([str(source), str(tmp_path / "whole")]) == 0
    load_model_config(model_config(str(tmp_path / "whole")))  # not refused
    found, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    expected = AutoModelForCausalLM.from_pretrained(source, quantization_config=Mxfp4Config(dequantize=True))
    for name, weight in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), weight.float()), name


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
