"""Whole runs of models with recurrent layers, and of others that no demo has, sampled by the torch engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from spmdrl.tools.tiny_model import character_tokenizer
from tests.helpers.models import save_other, save_qwen3_next
from tests.helpers.small_run import launch, rows, sample_rows, write_config

OTHERS = ("nemotron_h", "lfm2", "gemma4_text", "deepseek_v3")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(save_qwen3_next, id="qwen3_next"),
        *(pytest.param(partial(save_other, name), id=name, marks=pytest.mark.slow) for name in OTHERS),
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
    write_config(
        path, run={"name": "run", "num_steps": 6, "seed": 3, "deterministic": True, "threads_per_rank": 1}, eval=None
    )
    return path


def test_engine_and_trainer_agree_in_every_step_and_the_policy_learns(folder: Path) -> None:
    launch(folder, 2, "report.samples_per_step=100")
    run = folder / "runs/run"
    steps = rows(run)
    assert [row["step"] for row in steps] == list(range(1, 7))
    assert {row["step"] - row["version"] for row in sample_rows(run) if "response" in row} == {1}
    assert all(0 < row["mismatch/max_abs_nats"] < 1e-5 for row in steps)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.1
    AutoModelForCausalLM.from_pretrained(run / "hf")
