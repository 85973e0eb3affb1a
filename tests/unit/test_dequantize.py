"""Checkpoints in MXFP4 and FP8, made whole: what transformers makes of them, what is trained, and written again."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model import few_bits
from spmdrl.model.load import load_model_config, load_plain, load_policy
from spmdrl.model.weight_files import stored_format, stored_weights, weight_file_problems
from spmdrl.step.export import export_hf
from spmdrl.tools.dequantize import main
from spmdrl.tools.tiny_model import character_tokenizer
from tests.helpers.configs import model_config
from tests.helpers.few_bits import FP4, in_fp8, published, save_deepseek_in_fp8, save_gpt_oss_in_mxfp4
from tests.helpers.models import save_llama

WHOLE_BLOCKS = {"q_lora_rank": 16, "v_head_dim": 8, "moe_intermediate_size": 32}  # transformers stops at others


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


@pytest.mark.parametrize(
    ("save", "reader"),
    [
        (save_gpt_oss_in_mxfp4, Mxfp4Config(dequantize=True)),
        (partial(save_deepseek_in_fp8, **WHOLE_BLOCKS), FineGrainedFP8Config(dequantize=True)),
    ],
    ids=["mxfp4", "fp8"],
)
def test_transformers_reads_an_export_like_its_source_by_its_own_quantizer(
    tmp_path: Path, save: Callable[[Path], str], reader: Any
) -> None:
    source, export, whole = save(tmp_path / "source"), tmp_path / "export", tmp_path / "whole"
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(source), meshes.model, temperature=1.0)
        with torch.no_grad():  # as if it were trained
            for parameter in policy.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        export_hf(policy, character_tokenizer(), export, meshes, dtype=torch.bfloat16, as_source=True)
    assert main([str(export), str(whole)]) == 0
    ours = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
    theirs, report = AutoModelForCausalLM.from_pretrained(
        export, quantization_config=reader, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    before = load_plain(model_config(source), torch.bfloat16)
    for name, weight in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(name), weight), name
        assert not torch.equal(before.get_parameter(name), weight), name
    ids = torch.arange(3, 40)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)


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


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32]}
FORMATS: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype, list[int]]] = {  # numbers, scales and their shape
    "fp8": (BLOCKS, E4M3, torch.float32, [3, 2]),
    "scales in bfloat16": (BLOCKS, E5M2, torch.bfloat16, [3, 2]),
    "powers of two": (BLOCKS | {"scale_fmt": "ue8m0"}, E4M3, torch.float32, [3, 2]),
    "bytes of exponents": (BLOCKS | {"scale_fmt": "ue8m0"}, E4M3, torch.float8_e8m0fnu, [3, 2]),
    "one number": ({"quant_method": "fp8"}, E4M3, torch.float32, []),
}


def _again(path: Path, name: str, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write other numbers of a weight into the files, twice; returns what they stand for, and what was written."""
    for _ in range(2):
        made = stored_format(path).encoded(name, numbers)
        before = load_file(path / "model.safetensors")
        save_file(before | made, path / "model.safetensors", {"format": "pt"})
        numbers = stored_weights(path)[name][...]
    assert all(
        torch.equal(before[part].flatten().view(torch.uint8), made[part].flatten().view(torch.uint8)) for part in made
    ), "a fixed point"
    own, scales = made.values()
    return numbers, own, scales


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("slab", [64, 2**22])
def test_changed_numbers_become_the_nearest_of_float8(
    tmp_path: Path, name: str, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_bits, "_SLAB", slab)
    quantization, dtype, of_scales, shape = FORMATS[name]
    scale = torch.full(shape, 0.25).to(of_scales)
    stored = {"a.weight": (100 * torch.randn(40, 50)).to(dtype), "a.weight_scale_inv": scale}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    weight = stored_weights(tmp_path)["a.weight"][...]
    weight[20:, :] *= torch.linspace(0.5, 900, 50)
    found, codes, scales = _again(tmp_path, "a.weight", weight)
    spread = scales.float().reshape([*shape] or [1, 1])
    height, width = (16, 32) if shape else (40, 50)
    spread = spread.repeat_interleave(height, 0).repeat_interleave(width, 1)[:40, :50]
    if shape:
        assert torch.equal(codes[:16].view(torch.uint8), stored["a.weight"][:16].view(torch.uint8)), (
            "nobody changed these"
        )
        assert (scales.float()[0] == 0.25).all() and (scales.float()[2] > 0.25).all()
    assert (codes.float().abs() <= torch.finfo(dtype).max).all()
    every = torch.arange(256).to(torch.uint8).view(dtype).float()
    nearest = (every[every.isfinite()] * spread.unsqueeze(-1) - weight.float().unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((codes.float() * spread - weight.float()).abs(), nearest, rtol=0, atol=1e-6 * 900)
    assert torch.equal(found, (codes.float() * spread).bfloat16())
    if "scale_fmt" in quantization:
        assert torch.equal(scales.float().log2(), scales.float().log2().round())


@pytest.mark.parametrize("slab", [64, 2**22])
def test_changed_numbers_become_the_nearest_of_4_bits(
    tmp_path: Path, slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_bits, "_SLAB", slab)
    save_gpt_oss_in_mxfp4(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    weight = stored_weights(tmp_path)[name][...]
    weight[1] *= torch.linspace(0.5, 9, weight.shape[2])
    weight[2, :32] = 0
    weight[3] += 0.01
    before = load_file(tmp_path / "model.safetensors")
    found, blocks, scales = _again(tmp_path, name, weight)
    assert torch.equal(blocks[0], before[f"{name}_blocks"][0]), "nobody changed these"
    spread = (scales.float() - 127).exp2().repeat_interleave(32, 2).transpose(1, 2)
    nearest = (FP4 * spread.unsqueeze(-1) - weight.float().unsqueeze(-1)).abs().amin(-1)
    assert torch.equal((found.float() - weight.float()).abs(), nearest)
    assert (weight.float().abs() <= 6 * spread).all(), "none is cut off"


def test_a_weight_without_its_scales_is_named_before_the_run(tmp_path: Path) -> None:
    path = save_deepseek_in_fp8(tmp_path)
    assert not list(weight_file_problems(path))
    file, name = tmp_path / "model.safetensors", "model.layers.0.self_attn.o_proj.weight_scale_inv"
    save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file, {"format": "pt"})
    (sentence,) = weight_file_problems(path)
    assert sentence == f'model.path = "{path}": there are no scales {name} for a weight of few bits'
