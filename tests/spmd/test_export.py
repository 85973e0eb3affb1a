"""An exported directory holds the policy's weights bit for bit, under the names of files, however they are split."""

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
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from spmdrl.config import ParallelConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.load import load_policy
from spmdrl.step.export import export_hf
from spmdrl.tools.dequantize import dequantize
from spmdrl.tools.tiny_model import character_tokenizer
from tests.helpers.configs import model_config
from tests.helpers.few_bits import save_deepseek_in_fp8, save_gpt_oss_in_mxfp4, save_qwen3_in_bfloat16
from tests.helpers.models import (
    HAS_EXPERT_PLANS,
    longrope,
    save_gemma3,
    save_gpt_oss,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_moe,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.vision_models import save_gemma3_vl, save_gemma4_that_hears, save_qwen3_vl_moe

SIZES = {"bucket_bytes": 2**12, "file_bytes": 2**14}
SOURCE = {"as_source": True}
Job = tuple[str, Path, dict[str, Any], torch.dtype, dict[str, Any]]  # model, destination, parallel, dtype, sizes


def _export(jobs: list[Job]) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        for model, destination, parallel, dtype, sizes in jobs:
            meshes = build_meshes(world, ParallelConfig(**parallel))
            policy = load_policy(model_config(model), meshes.model, temperature=1.0)
            export_hf(policy, character_tokenizer(), destination, meshes, dtype=dtype, **sizes)


def _files(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _with_more_layers(path: Path) -> str:
    """A model in whose files there are layers for multi-token prediction, in a dtype of their own."""
    file = Path(save_qwen3_5(path), "model.safetensors")
    more = {"mtp.layers.0.mlp.up_proj.weight": torch.randn(8, 4).double(), "mtp.norm.weight": torch.randn(4)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    return str(path)


def _with_scales_of_activations(path: Path) -> str:
    file = Path(save_deepseek_in_fp8(path), "model.safetensors")
    more = {"model.layers.0.self_attn.o_proj.activation_scale": torch.tensor(0.5)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    return str(path)


CASES: dict[str, tuple[Callable[[Path], str], dict[str, int]]] = {
    "fsdp": (save_qwen3, {}),
    "hsdp": (partial(save_qwen3, **longrope(20, num_factors=8)), {"dp_replicate": 2}),
    "packed-experts": (save_gpt_oss, {}),
    "fewer-experts-than-ranks": (partial(save_qwen3_moe, vocab_size=64, num_experts=1, num_experts_per_tok=1), {}),
    "tied": (save_gemma3, {}),
    "tower-and-experts": (save_qwen3_vl_moe, {}),
    "tower": (save_gemma3_vl, {}),
    "tower-for-sounds": (save_gemma4_that_hears, {}),
    "more-layers": (_with_more_layers, {}),
    "mxfp4": (save_gpt_oss_in_mxfp4, {}),
    "fp8": (_with_scales_of_activations, {}),
    "bfloat16": (save_qwen3_in_bfloat16, {}),
}
FEW_BITS = ("mxfp4", "fp8")
AS_SOURCE = (*FEW_BITS, "bfloat16", "more-layers", "tower-for-sounds")
if HAS_EXPERT_PLANS:
    CASES["experts"] = (partial(save_qwen3_moe, vocab_size=64, num_experts=4), {"tp": 2, "ep": 2})
PROCESSOR = "preprocessor_config.json"


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} ranks".format)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case's model and its export, all by the same ranks."""
    folder = tmp_path_factory.mktemp("exports")
    jobs: list[Job] = []
    for name, (save, parallel) in CASES.items():
        model = save(folder / name / "model")
        (folder / name / "model" / PROCESSOR).write_text('{"image_processor_type": "any"}')
        if name in FEW_BITS:
            dequantize(folder / name / "model", folder / name / "whole")
        jobs.append((model, folder / name / "hf", parallel, torch.float32, SIZES))
    again = [job for job in jobs if job[1].parent.name in AS_SOURCE]
    for ranks in (1, request.param):
        others = [(job[0], job[1].with_name(f"of {ranks}"), {}, torch.float16, SIZES | SOURCE) for job in again]
        run_ranks(ranks, _export, others + (jobs if ranks > 1 else []))
    return folder


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_those_the_model_came_from(exported: Path, name: str) -> None:
    is_of_few_bits = name in FEW_BITS  # then of the numbers that they stand for
    model, hf = exported / name / ("whole" if is_of_few_bits else "model"), exported / name / "hf"
    expected, found = _files(model), _files(hf)
    assert found.keys() == expected.keys()
    if is_of_few_bits:  # bfloat16 is exact in float32
        expected = {name: tensor.to(found[name].dtype) for name, tensor in expected.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    AutoModel.from_pretrained(hf)  # by the index
    configs = [AutoConfig.from_pretrained(folder) for folder in (model, hf)]
    sounds = [getattr(config, "audio_config", None) for config in configs]
    assert repr(sounds[0]) == repr(sounds[1])
    assert configs[0].get_text_config().rope_parameters == configs[1].get_text_config().rope_parameters
    assert (hf / PROCESSOR).read_text() == (model / PROCESSOR).read_text()
    assert len(list(hf.glob("*.safetensors"))) > 1, "dealt out to the ranks"
    assert not hf.with_suffix(".unfinished").exists()


@pytest.mark.parametrize("name", AS_SOURCE)
def test_what_was_not_trained_is_written_as_it_came(exported: Path, name: str) -> None:
    model, (one, more) = exported / name / "model", sorted((exported / name).glob("of *"))
    expected, found = _files(model), _files(one)
    assert found.keys() == expected.keys()
    assert {key: (x.dtype, x.shape) for key, x in found.items()} == {
        key: (x.dtype, x.shape) for key, x in expected.items()
    }
    for key, tensor in expected.items():
        assert torch.equal(found[key].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), key
    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in more.iterdir()
    }
    configs = [json.loads((folder / "config.json").read_text()) for folder in (model, one)]
    for key in ("dtype", "quantization_config"):
        assert configs[0].get(key) == configs[1].get(key)
    index = json.loads((one / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_transformers_loads_it(tmp_path: Path) -> None:
    model = save_qwen3(tmp_path / "model")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/leftover.safetensors").touch()
    job: Job = (model, tmp_path / "hf", {}, torch.bfloat16, {"bucket_bytes": 2**14, "file_bytes": 2**16})
    run_ranks(2, _export, [job])
    before = AutoModelForCausalLM.from_pretrained(model)
    after, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert after.dtype == torch.bfloat16 and after.config.architectures == before.config.architectures
    for (name, expected), (_, found) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(expected.bfloat16(), found), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer.encode("1 + 2")) == character_tokenizer().decode(tokenizer.encode("1 + 2"))
