"""Training on pairs is TRL's DPOTrainer and RewardTrainer, and from a teacher its DistillationTrainer: the same losses,
and the same weights after ten steps.

TRL has an environment of its own, `.venv-trl`, which `bash benchmarks/run.sh` makes; without it this is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from spmdrl import sft
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.pair_runs import preferring, write_pairs_run
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import rows, without_curves, write_sft_config

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TRL_PYTHON", ROOT / ".venv-trl/bin/python"))
NUM_STEPS = 10
NUM_PAIRS = 90  # of `write_pairs_run`


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-trl; `bash benchmarks/run.sh` makes it")
@pytest.mark.parametrize(
    ("lr", "ours", "theirs"),
    [
        (0.2, {}, {"loss_type": ["sigmoid"], "beta": 0.1}),
        (0.01, {"loss": "ipo", "beta": 0.5}, {"loss_type": ["ipo"], "beta": 0.5}),
        (0.05, {"length_normalized": True, "beta": 2.0}, {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
        (0.02, {"loss": "bradley_terry", "center_coef": 0.01}, {"center_rewards_coefficient": 0.01}),
    ],
    ids=["sigmoid", "ipo", "by-length", "rewards"],
)
def test_losses_and_weights_are_trls(lr: float, ours: dict[str, Any], theirs: dict[str, Any], tmp_path: Path) -> None:
    rewards = ours.get("loss") == "bradley_terry"
    save_tiny_model(tmp_path / "model", num_layers=2)
    if rewards:  # both begin with the same head
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=1)
        model.save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model")
    config = write_pairs_run(
        tmp_path,
        run={"dir": str(tmp_path), "num_steps": NUM_STEPS},
        held_out=None,
        pairs={"pairs_per_step": NUM_PAIRS, "max_response_tokens": 16, **ours},
        optim={"name": "sgd", "momentum": 0.0, "lr": lr, "max_grad_norm": 1e9},
    )
    assert run_ranks(2, preferring, [str(config)])[0][0] == 0
    job = {
        "trainer": "rewards" if rewards else "pairs",
        "rows": f"{tmp_path}/train.jsonl",
        "num_steps": NUM_STEPS,
        "lr": lr,
        "settings": theirs,
    }
    assert_same_training(tmp_path, job)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-trl; `bash benchmarks/run.sh` makes it")
@pytest.mark.parametrize(
    ("ours", "beta"),
    [({"divergence": "forward"}, 0.0), ({"divergence": "reverse"}, 1.0), ({"divergence": "jsd", "beta": 0.3}, 0.3)],
    ids=["forward", "reverse", "jsd"],
)
def test_distillation_is_trls(ours: dict[str, Any], beta: float, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_layers=2)
    save_tiny_model(tmp_path / "teacher", num_layers=3, seed=5)
    answers = [{"prompt": f"{a} + {b} =", "response": f" {a + b}"} for a in range(10) for b in range(9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    source = {"kind": "jsonl", "path": f"{tmp_path}/train.jsonl", "answer_column": "", "response_column": "response"}
    config = write_sft_config(
        tmp_path,
        run={"dir": str(tmp_path), "num_steps": NUM_STEPS},
        data={"sources": [source]},
        sft={"sequences_per_step": len(answers), "max_response_tokens": 16, "loss_coef": 0.0},
        models={"big": {"path": f"{tmp_path}/teacher"}},
        distill={"teacher": "big", **ours},
        optim={"name": "sgd", "momentum": 0.0, "lr": 0.2, "max_grad_norm": 1e9},
    )
    assert set(run_ranks(2, without_curves, sft.main, [str(config)])) == {0}
    job = {
        "trainer": "distillation",
        "teacher": f"{tmp_path}/teacher",
        "rows": f"{tmp_path}/train.jsonl",
        "num_steps": NUM_STEPS,
        "lr": 0.2,
        "settings": {"beta": beta, "max_completion_length": 16},
    }
    assert_same_training(tmp_path, job)


def assert_same_training(folder: Path, job: dict[str, Any]) -> None:
    """Train the folder's model with TRL, and compare losses and weights with those of the folder's run."""
    (folder / "theirs").mkdir()
    paths = {"model": f"{folder}/model", "out": f"{folder}/theirs"}
    (folder / "job.json").write_text(json.dumps(paths | job))
    done = subprocess.run(
        [PYTHON, ROOT / "tests/helpers/trl_pairs.py", folder / "job.json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [row["update/loss"] for row in rows(folder / "run")]
    assert losses == pytest.approx(json.loads((folder / "theirs/losses.json").read_text()), rel=1e-4)
    found, expected = (load_file(folder / name / "hf/model.safetensors") for name in ("run", "theirs"))
    assert found.keys() == expected.keys()
    began = load_file(folder / "model/model.safetensors")
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, atol=1e-5, rtol=0), name
    assert max(float((expected[name] - began[name]).abs().max()) for name in expected if name in began) > 1e-3
