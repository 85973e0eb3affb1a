"""Weights of few bits as checkpoints are published with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.models import save_gpt_oss, save_other, save_qwen3

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


def in_fp8(weights: Mapping[str, Tensor], block: int = 32) -> dict[str, Tensor]:
    """Linear layers as DeepSeek's are published: float8, with a scale for each block of so many rows and columns."""
    made: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith("_proj.weight"):
            made[name] = weight
            continue
        rows, columns = (-(-size // block) for size in weight.shape)
        scale = 0.01 + torch.rand(rows, columns)
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: weight.shape[0], : weight.shape[1]]
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


def save_qwen3_in_bfloat16(path: Path) -> str:
    """A random Qwen3 in bfloat16 but for a norm."""
    file = Path(save_qwen3(path), "model.safetensors")
    mixed = {name: x.float() if name == "model.norm.weight" else x.bfloat16() for name, x in load_file(file).items()}
    save_file(mixed, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return str(path)


def save_gpt_oss_in_mxfp4(path: Path, **changes: Any) -> str:
    """A random gpt-oss as it is published."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
    save_gpt_oss(path, **(sizes | changes))
    not_converted = ["model.embed_tokens", "lm_head"]
    published(path, in_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": not_converted})
    return str(path)


def save_deepseek_in_fp8(path: Path, **changes: Any) -> str:
    """A random DeepSeek V3 as it is published: blocks that do not divide all weights, and a layer for multi-token
    prediction after the last one."""
    block = 16

    def convert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        more = {
            name.replace("layers.1.", "layers.2."): weight + 1
            for name, weight in weights.items()
            if "layers.1." in name
        }
        return in_fp8({**weights, **more, "model.layers.2.eh_proj.weight": torch.randn(32, 64)}, block)

    save_other("deepseek_v3", path, **changes)
    published(path, convert, {"quant_method": "fp8", "weight_block_size": [block, block]})
    return str(path)
