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
NUM_STEPS, GROUP_SIZE, MAX_RESPONSE, LR = 10, 4, 6, 0.1
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


def _trained_all(cases: list[tuple[str, int, bool]]) -> list[dict[str, Any]]:
    return [_trained(*case) for case in cases]


Case = tuple[str, float, int]  # name, beta, iterations
EVERYTHING: list[Case] = [(name, beta, count) for name in CASES for beta in (0.0, 0.05) for count in (1, 2)]


def _write_run(folder: Path, case: Case) -> str:
    name, beta, _ = case
    folder.mkdir()
    config = write_small_run(
        folder,
        model={"num_layers": 2},
        run={"num_steps": NUM_STEPS},
        eval=None,
        loss={"updates_per_step": 1, "kl_coef": beta, **CASES[name][0]},
        optim={"name": "sgd", "momentum": 0.0, "lr": LR, "max_grad_norm": 1.0},
        rollout={"group_size": GROUP_SIZE, "max_response_tokens": MAX_RESPONSE},
        checkpoint={"every": 0},
        report={"tensorboard": False},
        debug={"assert_on_policy": False},
    )
    return str(config)


def _write_job(folder: Path, case: Case, steps: list[Any]) -> str:
    name, beta, count = case
    job = {
        "model": f"{folder}/model",
        "out": f"{folder}/theirs",
        "steps": steps,
        "group_size": GROUP_SIZE,
        "num_iterations": count,
        "max_response_tokens": MAX_RESPONSE,
        "lr": LR,
        "max_grad_norm": 1.0,
        "settings": {"beta": beta, "use_bias_correction_kl": False, **CASES[name][1]},
    }
    (folder / "theirs").mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    return f"{folder}/job.json"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Path, dict[str, Any]]]:
    """The folder of each case, where both have trained, and what we measured; one process each for all of them."""
    if not PYTHON.exists():
        pytest.skip("there is no .venv-trl; `bash benchmarks/run.sh` makes it")
    root = tmp_path_factory.mktemp("trl")
    folders = {case: root / f"{place}" for place, case in enumerate(EVERYTHING)}
    runs = [(_write_run(folder, case), case[2], CASES[case[0]][2]) for case, folder in folders.items()]
    ours = run_ranks(1, _trained_all, runs, timeout_s=900.0)[0]
    jobs = [_write_job(folders[case], case, one["steps"]) for case, one in zip(EVERYTHING, ours, strict=True)]
    command = [PYTHON, ROOT / "tests/helpers/trl_rollouts.py", *jobs]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return {case: (folders[case], one) for case, one in zip(EVERYTHING, ours, strict=True)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", EVERYTHING, ids=lambda case: "-".join(map(str, case)))
def test_losses_and_weights_are_trls(case: Case, everything: dict[Case, tuple[Path, dict[str, Any]]]) -> None:
    folder, ours = everything[case]
    found = json.loads((folder / "theirs/found.json").read_text())
    for mine, their in zip(ours["advantages"], found["advantages"], strict=True):
        assert mine == pytest.approx(their, abs=1e-5)
    for name, theirs in (("update/loss", "loss"), ("update/grad_norm", "grad_norm")):
        values = [row[name] for row in ours["updates"]]
        assert values == pytest.approx(found[theirs], rel=1e-5, abs=1e-5), name
    weights, expected = (load_file(folder / path / "hf/model.safetensors") for path in ("runs/run", "theirs"))
    began = load_file(folder / "model/model.safetensors")
    for name, weight in expected.items():
        assert float((weights[name] - weight).abs().max()) < 1e-5, name
    assert max(float((expected[name] - began[name]).abs().max()) for name in expected) > 1e-3
