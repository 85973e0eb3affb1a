"""Training on the same rollouts is TRL's GRPOTrainer: advantages, losses, gradient norms, weights after ten steps; and
trees of sequences have the loss terms of its tree rows.

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
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from spmdrl import Trainer, load_config
from spmdrl.algo.losses import ppo
from spmdrl.algo.prefix_tree import BLOCK_TOKENS
from spmdrl.model.policy import Policy
from spmdrl.model.trunk import attention_of, model_class
from spmdrl.report import Report
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import RewardedRollout
from spmdrl.types import Sequence as Trajectory
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import write_small_run
from tests.helpers.trees import sequences_of_trees

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


def _group() -> list[Trajectory]:
    """Responses of 5 to 12 tokens to one prompt of 2 blocks, of which each begins with another token."""
    prompt = tuple(range(10, 10 + 2 * BLOCK_TOKENS))
    return [
        Trajectory(
            index=place,
            token_ids=(*prompt, *range(2 + place, 7 + 2 * place)),
            loss_mask=(False,) * len(prompt) + (True,) * (5 + place),
            rollout_logprobs=(0.0,) * len(prompt) + (-2.0 - 0.1 * place,) * (5 + place),
            reward=0.0,
        )
        for place in range(8)
    ]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-trl; `bash benchmarks/run.sh` makes it")
def test_trees_have_the_loss_terms_of_trls_tree_rows(tmp_path: Path) -> None:
    """A prompt of whole blocks is computed once in both; TRL computes its last token once for each label."""
    path, epsilon, temperature = save_qwen3(tmp_path / "model"), 0.2, 0.8
    cases = {"group": _group(), "trees": sequences_of_trees(12)}
    jobs = []
    for name, sequences in cases.items():
        samples = [
            {
                "input_ids": one.token_ids,
                "completion_mask": list(map(int, one.loss_mask)),
                "old_log_probs": one.rollout_logprobs,
                "advantage": float(place % 5 - 2),
                "group_id": 0,
                "metrics": {},
            }
            for place, one in enumerate(sequences)
        ]
        (tmp_path / name).mkdir()
        job = {"model": path, "out": f"{tmp_path}/{name}", "epsilon": epsilon, "temperature": temperature}
        jobs.append(tmp_path / f"{name}.json")
        jobs[-1].write_text(json.dumps(job | {"samples": samples}))
    command = [PYTHON, ROOT / "tests/helpers/trl_trees.py", *jobs]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, sequences in cases.items():
        theirs = json.loads((tmp_path / name / "found.json").read_text())
        num_terms = sum(map(sum, (one.loss_mask for one in sequences)))
        weights = dict.fromkeys((one.index for one in sequences), 1 / num_terms)
        micro_batch = lay_end_to_end(sequences, weights, shares_prefixes=True)
        assert micro_batch.tree is not None
        of_sequence = torch.tensor([len(one.token_ids) for one in sequences])
        advantages = (torch.arange(len(sequences)) % 5 - 2.0).repeat_interleave(of_sequence)
        terms = micro_batch.loss_mask
        # A term's label, place in its sequence, old log-probability and advantage, and the token that predicts it.
        predicting, inputs = torch.tensor(theirs["token_index"]), torch.tensor(theirs["input_ids"])
        labels, positions = torch.tensor(theirs["shift_labels"]), torch.tensor(theirs["position_ids"])
        assert torch.equal(labels[predicting], micro_batch.token_ids[terms])
        assert torch.equal(positions[predicting] + 1, micro_batch.positions[terms])
        assert torch.equal(inputs[predicting], micro_batch.token_ids.roll(1)[terms])
        own = micro_batch.rollout_logprobs
        torch.testing.assert_close(torch.tensor(theirs["old_log_probs"]), own[terms], rtol=0, atol=0)
        torch.testing.assert_close(torch.tensor(theirs["advantages"]), advantages[terms], rtol=0, atol=0)
        assert num_terms == theirs["global_n_tokens"] > len({*theirs["token_index"]}) - (name == "group")
        if name == "group":
            assert len(inputs) == micro_batch.num_computed + len(sequences) - 1
        kind = model_class(config := AutoConfig.from_pretrained(path))
        model = kind.from_pretrained(path, attn_implementation=attention_of(config), dtype=torch.float32)
        policy = Policy(model, kernel="sdpa", temperature=temperature, logits_chunk_tokens=64)
        logprobs = policy(micro_batch).logprobs
        torch.testing.assert_close(logprobs[terms], torch.tensor(theirs["logprobs"]), rtol=1e-5, atol=1e-5)
        loss = ppo(logprobs, own, advantages, terms, clip_low=epsilon, clip_high=epsilon).per_token
        loss = (loss * micro_batch.loss_weights).sum()
        assert loss.item() == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-6)
        loss.backward()
        expected = load_file(tmp_path / name / "gradients.safetensors")
        found = {key: p.grad for key, p in policy.model.named_parameters()}
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6, msg=f"{name}, {key}")
