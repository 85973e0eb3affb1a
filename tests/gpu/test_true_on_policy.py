"""On CUDA devices the mode is refused, until the last of these tests passes with SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.tools.tiny_model import save_tiny_model
from tests.e2e.test_train import CONFIG, REWARD


def train(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of 4 steps on one rank with `true_on_policy = true`."""
    save_tiny_model(tmp_path / "model", num_layers=2)
    (tmp_path / "reward.py").write_text(REWARD)
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(runs=tmp_path, model=tmp_path / "model", reward=tmp_path / "reward.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    return subprocess.run(
        [*torchrun, "-m", "spmdrl.train", str(config), "true_on_policy=true", *overrides],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.timeout(300)
def test_it_is_refused_by_name(tmp_path: Path) -> None:
    done = train(tmp_path)
    assert done.returncode != 0
    assert "true_on_policy = true is proven on CPUs, not on CUDA devices" in done.stderr


@pytest.mark.skip(reason="true_on_policy = true is refused on CUDA; docs/true-on-policy.md says what is missing")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_sglang_and_the_trainer_agree_exactly(tmp_path: Path, backend: str) -> None:
    done = train(tmp_path, "rollout.engine=sglang", f"rollout.attention_backend={backend}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch/max_abs_nats"] for row in rows if row["step"]] == [0.0] * 4
