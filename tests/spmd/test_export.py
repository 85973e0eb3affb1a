"""An exported directory holds the policy's weights bit for bit, under the names of files, however they are split."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from spmdrl.config import ParallelConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.load import load_policy
from spmdrl.step.export import export_hf
from spmdrl.tools.tiny_model import character_tokenizer
from tests.helpers.configs import model_config
from tests.helpers.models import (
    needs_expert_plans,
    save_gemma3,
    save_gpt_oss,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_moe,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.vision_models import save_gemma3_vl, save_qwen3_vl_moe


def _export(model: str, destination: Path, parallel: dict[str, Any], dtype: torch.dtype, sizes: dict[str, int]) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
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


@pytest.mark.parametrize(
    ("save", "parallel"),
    [
        pytest.param(save_qwen3, {}, id="fsdp"),
        pytest.param(save_qwen3, {"dp_replicate": 2}, id="hsdp"),
        pytest.param(
            partial(save_qwen3_moe, vocab_size=64, num_experts=4),
            {"tp": 2, "ep": 2},
            id="experts",
            marks=needs_expert_plans,
        ),
        pytest.param(save_gpt_oss, {}, id="packed-experts"),
        pytest.param(save_gemma3, {}, id="tied"),
        pytest.param(save_qwen3_vl_moe, {}, id="tower-and-experts"),
        pytest.param(save_gemma3_vl, {}, id="tower"),
        pytest.param(_with_more_layers, {}, id="more-layers"),
    ],
)
def test_the_files_are_those_the_model_came_from(
    tmp_path: Path, save: Callable[..., str], parallel: dict[str, Any]
) -> None:
    model = save(tmp_path / "model")
    processor = Path("preprocessor_config.json")
    (model / processor).write_text('{"image_processor_type": "any"}')
    sizes = {"bucket_bytes": 2**12, "file_bytes": 2**14}
    run_ranks(4, _export, model, tmp_path / "hf", parallel, torch.float32, sizes)
    expected, found = _files(Path(model)), _files(tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    AutoModel.from_pretrained(tmp_path / "hf")  # by the index
    assert (tmp_path / "hf" / processor).read_text() == (model / processor).read_text()
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1, "dealt out to the ranks"
    assert not (tmp_path / "hf.unfinished").exists()


def test_transformers_loads_it(tmp_path: Path) -> None:
    model = save_qwen3(tmp_path / "model")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/leftover.safetensors").touch()
    run_ranks(2, _export, model, tmp_path / "hf", {}, torch.bfloat16, {"bucket_bytes": 2**14, "file_bytes": 2**16})
    before = AutoModelForCausalLM.from_pretrained(model)
    after, report = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert after.dtype == torch.bfloat16 and after.config.architectures == before.config.architectures
    for (name, expected), (_, found) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(expected.bfloat16(), found), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer.encode("1 + 2")) == character_tokenizer().decode(tokenizer.encode("1 + 2"))
