"""Whole runs of models with recurrent layers, and of others that no demo has, sampled by the torch engine."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl import sft
from spmdrl.model.few_bits import quantization_of
from spmdrl.model.load import load_plain
from spmdrl.model.weight_files import stored_format, stored_weights
from spmdrl.tools.tiny_model import character_tokenizer
from tests.helpers.configs import model_config
from tests.helpers.few_bits import save_deepseek_in_fp8, save_gpt_oss_in_mxfp4
from tests.helpers.models import save_other, save_qwen3_next
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import launch, rows, sample_rows, without_curves, write_config, write_sft_config

OTHERS = {
    **{name: partial(save_other, name) for name in ("nemotron_h", "lfm2", "gemma4_text")},
    "gpt-oss in mxfp4": save_gpt_oss_in_mxfp4,
    "deepseek_v3 in fp8": save_deepseek_in_fp8,
}
STEPS, MORE_STEPS = 6, 20


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(save_qwen3_next, id="qwen3_next"),
        *(pytest.param(save, id=name, marks=pytest.mark.slow) for name, save in OTHERS.items()),
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and the configuration of a small run of it."""
    path = tmp_path_factory.mktemp("recurrent")
    tokenizer = character_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    ids |= {"vocab_size_per_layer_input": len(tokenizer)} if "gemma4_text" in str(request.param) else {}
    request.param(path / "model", vocab_size=len(tokenizer), **ids)
    tokenizer.save_pretrained(path / "model")
    num_steps = STEPS if request.param is save_qwen3_next else MORE_STEPS
    run = {"name": "run", "num_steps": num_steps, "seed": 3, "deterministic": True, "threads_per_rank": 1}
    write_config(path, run=run, eval=None)
    return path


def test_engine_and_trainer_agree_in_every_step_and_the_policy_learns(folder: Path) -> None:
    launch(folder, 2, "report.samples_per_step=100")
    run = folder / "runs/run"
    steps = rows(run)
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1)) and len(steps) in (STEPS, MORE_STEPS)
    assert {row["step"] - row["version"] for row in sample_rows(run) if "response" in row} == {1}
    assert all(0 < row["mismatch/max_abs_nats"] < 1e-5 for row in steps)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.1
    AutoModelForCausalLM.from_pretrained(run / "hf")


@pytest.mark.slow
def test_fine_tuning_learns_what_is_written(folder: Path) -> None:
    lines = [{"prompt": f"{a} + {b} =", "response": f" {a + b}"} for a in range(8) for b in range(8)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "jsonl", "path": f"{folder}/sft.jsonl", "answer_column": "", "response_column": "response"}
    run = {"name": "sft", "num_steps": MORE_STEPS, "deterministic": True, "threads_per_rank": 1}
    sizes = {"sequences_per_step": 16, "max_response_tokens": 6}
    tables = {"data": {"sources": [source]}, "sft": sizes, "export": {"dtype": "source"}}
    path = write_sft_config(folder, name="sft.toml", run=run, **tables)
    assert set(run_ranks(2, without_curves, sft.main, [str(path)], timeout_s=250.0)) == {0}
    found = [row["update/loss"] for row in rows(folder / "runs/sft")]
    assert len(found) == MORE_STEPS and found[-1] < 0.7 * found[0], found
    hf = folder / "runs/sft/hf"
    (model, exported) = (stored_format(path) for path in (folder / "model", hf))
    names = stored_weights(hf).keys()
    assert names == stored_weights(folder / "model").keys()
    for name in names:
        dtypes = [
            {part: stored.get_dtype() for part, stored in one.parts_of(name).items()} for one in (model, exported)
        ]
        assert dtypes[0] == dtypes[1]
    assert quantization_of(hf) == quantization_of(folder / "model")
    load_plain(model_config(str(hf)), torch.float32)
