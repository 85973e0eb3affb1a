"""Whole runs on one CUDA device, from the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.device_sizes import sized
from tests.helpers.small_run import (
    assert_same_weights,
    rows,
    steady_rows,
    sums_from_files,
    torchrun,
    write_sft_config,
    write_small_run,
)

MODEL = {"hidden_size": 64, "num_layers": 2}


@pytest.mark.claim(
    "Training on one device",
    "A run that stopped and was resumed exports the weights, and has the metrics, of one that never stopped.",
)
@pytest.mark.timeout(sized(240, emulated=900))
def test_a_run_that_stopped_is_bitwise_the_run_that_did_not(tmp_path: Path) -> None:
    write_small_run(tmp_path, model=MODEL, **sums_from_files(tmp_path))
    torchrun(tmp_path, 1, "run.name=whole")
    torchrun(tmp_path, 1, "run.name=stopped", "run.num_steps=2")
    torchrun(tmp_path, 1, "run.name=stopped")
    whole, stopped = tmp_path / "runs/whole", tmp_path / "runs/stopped"
    assert_same_weights(whole, stopped)
    assert steady_rows(whole) == steady_rows(stopped)


@pytest.mark.claim("Training on one device", "Fine-tuning by `spmdrl.sft` learns.")
@pytest.mark.timeout(sized(120, emulated=600))
def test_fine_tuning_learns(tmp_path: Path) -> None:
    tables = sums_from_files(tmp_path)
    write_small_run(tmp_path, model=MODEL, **tables)
    (source,) = tables["data"]["sources"]
    config = write_sft_config(
        tmp_path,
        run={"num_steps": 12, "seed": None, "deterministic": None},
        data={"sources": [source | {"response_column": "answer"}]},
        sft={"sequences_per_step": 16, "max_response_tokens": 4},
    )
    command = [sys.executable, "-m", "spmdrl.sft", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=sized(100, emulated=500))
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [row["update/loss"] for row in rows(tmp_path / "runs/run")]
    assert losses[-1] < 0.7 * losses[0]
