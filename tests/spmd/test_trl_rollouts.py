"""Training on the same rollouts is TRL's GRPOTrainer: advantages, losses, gradient norms, weights after ten steps.

TRL has an environment of its own, `.venv-trl`, which `bash benchmarks/run.sh` makes; without it this is skipped.
What is defined differently is set to theirs here, and named in docs/coming-from.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from safetensors.torch import load_file

from spmdrl import Trainer, load_config
from spmdrl.report import Report
from spmdrl.types import RewardedRollout
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import write_small_run

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("TRL_PYTHON", ROOT / ".venv-trl/bin/python"))
NUM_STEPS, GROUP_SIZE, MAX_RESPONSE = 10, 4, 6
EPSILON = 1e-4  # that TRL adds to a group's deviation; ours is 1e-6
# By name: our settings, theirs, and whether the group's deviation divides.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "grpo": ({"aggregation": "sequence_mean_token_mean"}, {"loss_type": "grpo"}, True),
    "dapo": ({"aggregation": "token_mean", "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}, True),
    "dr_grpo": ({"aggregation": "constant"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}, False),
    "cispo": ({"kind": "cispo", "clip_high": 4.0}, {"loss_type": "cispo", "epsilon_high": 5.0}, True),
    "sapo": ({"kind": "sapo", "aggregation": "sequence_mean_token_mean"}, {"loss_type": "sapo"}, True),
    "gspo": (
        {"kind": "gspo", "aggregation": "sequence_mean_token_mean", "clip_low": 3e-4, "clip_high": 4e-4},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        True,
    ),
}


def _advantages(rollouts: Sequence[RewardedRollout], *, divides: bool) -> list[float]:
    found = []
    for _, group in groupby(rollouts, key=lambda one: one.rollout.prompt.prompt_id):
        rewards = [one.outcome.reward for one in group]
        scale = statistics.stdev(rewards) + EPSILON if divides else 1.0
        found += [(reward - statistics.fmean(rewards)) / scale for reward in rewards]
    return found


def _trained(config: str, num_iterations: int, divides: bool) -> dict[str, Any]:
    """Train by the four calls; returns each step's rollouts of this rank, and what was measured."""
    steps, advantages, updates = [], [], []
    with (
        mock.patch.object(Report, "_write_curves", lambda *_: "no curves"),
        Trainer(load_config(config)).loop() as loop,
    ):
        for _ in loop:
            rollouts = loop.sample()
            own = _advantages(rollouts, divides=divides)
            for _ in range(num_iterations):
                loop.forward_backward(rollouts, own)
                updates.append(loop.optim_step())
            steps.append([_recorded(one) for one in rollouts])
            advantages.append(own)
    return {"steps": steps, "advantages": advantages, "updates": updates}


def _recorded(one: RewardedRollout) -> dict[str, Any]:
    (response,) = one.rollout.responses
    return {
        "prompt_ids": one.rollout.prompt.token_ids,
        "completion_ids": response.token_ids,
        "logprobs": response.logprobs,
        "recorded_reward": one.outcome.reward,
    }


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-trl; `bash benchmarks/run.sh` makes it")
@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_trls(name: str, beta: float, num_iterations: int, tmp_path: Path) -> None:
    loss, theirs, divides = CASES[name]
    config = write_small_run(
        tmp_path,
        model={"num_layers": 2},
        run={"num_steps": NUM_STEPS},
        eval=None,
        loss={"updates_per_step": 1, "kl_coef": beta, "dual_clip": None, **loss},
        optim={"name": "sgd", "momentum": 0.0, "lr": 0.1, "max_grad_norm": 1.0},
        rollout={"group_size": GROUP_SIZE, "max_response_tokens": MAX_RESPONSE},
        checkpoint={"every": 0},
        report={"tensorboard": False},
        debug={"assert_on_policy": False},
    )
    ours = run_ranks(1, _trained, str(config), num_iterations, divides)[0]
    out = tmp_path / "theirs"
    out.mkdir()
    job = {
        "model": f"{tmp_path}/model",
        "out": str(out),
        "steps": ours["steps"],
        "group_size": GROUP_SIZE,
        "num_iterations": num_iterations,
        "max_response_tokens": MAX_RESPONSE,
        "lr": 0.1,
        "max_grad_norm": 1.0,
        "settings": {"beta": beta, "use_bias_correction_kl": False, **theirs},
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [PYTHON, ROOT / "tests/helpers/trl_rollouts.py", tmp_path / "job.json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out)
    assert done.returncode == 0, done.stderr
    found = json.loads((out / "found.json").read_text())
    for mine, their in zip(ours["advantages"], found["advantages"], strict=True):
        assert mine == pytest.approx(their, abs=1e-5)
    for ours_of, theirs_of in (("update/loss", "loss"), ("update/grad_norm", "grad_norm")):
        values = [row[ours_of] for row in ours["updates"]]
        assert values == pytest.approx(found[theirs_of], rel=1e-4, abs=1e-5), ours_of
    weights, expected = (load_file(path / "hf/model.safetensors") for path in (tmp_path / "runs/run", out))
    began = load_file(tmp_path / "model/model.safetensors")
    for tensor, weight in expected.items():
        assert float((weights[tensor] - weight).abs().max()) < 1e-5, tensor
    assert max(float((expected[tensor] - began[tensor]).abs().max()) for tensor in expected) > 1e-3
