"""A recorded step is computed again to the last bit, and recorded rollouts train what the run trained."""

from __future__ import annotations

import dataclasses
import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from spmdrl import train
from spmdrl.replay.recorder import StepFingerprint, difference, read_fingerprints, read_trainer_logprobs
from spmdrl.rollout.files import as_collected, folder_of, read_part, read_parts, recorded_steps, write_part
from spmdrl.tools import replay, runs
from tests.helpers.models import needs_expert_plans, save_qwen3_moe
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import rows, without_curves, write_small_run


def train_on(num_ranks: int, folder: Path, *overrides: str, exit_code: int = 0) -> None:
    assert (
        run_ranks(num_ranks, without_curves, train.main, [str(folder / "c.toml"), *overrides])
        == [exit_code] * num_ranks
    )


def reading(rollouts: Path) -> str:
    """The override that trains from files."""
    return f'debug={{ load_rollouts = "{rollouts}" }}'


def replayed(run: Path, step: int) -> tuple[int, str]:
    """The exit code and the words of the tool, on one rank."""
    words = StringIO()
    with redirect_stdout(words):
        code = replay.main([str(run), "--step", str(step)])
    return code, words.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of 3 steps on 2 ranks."""
    path = tmp_path_factory.mktemp("replay")
    write_small_run(
        path,
        model={"num_layers": 2, "spare_tokens": 1},
        run={"dir": str(path), "num_steps": 3, "seed": None},
        rollout={"prompts_per_step": 4, "max_response_tokens": 8},
        reward={"terms": [{"kind": "function", "function": f"{path}/reward.py:digits"}], "overlong_tokens": 4},
        advantage={"whiten": True},
        loss={"entropy_coef": 0.01, "entropy_target_nats": 2.0},
        optim={"state_on_host": True},
        pack={"max_tokens_per_micro_batch": 64},
        eval=None,
        checkpoint={"every": 1},
        report={"tensorboard": False},
        debug={"assert_on_policy": None, "save_rollouts": "all"},
    )
    train_on(2, path)
    return path


def test_a_step_is_computed_again_to_the_last_bit(folder: Path) -> None:
    """With an optimizer whose state is loaded, and coefficients that have been adapted."""
    assert recorded_steps(folder / "run/rollouts") == [1, 2, 3]
    (code, words), (other_code, nothing) = run_ranks(2, replayed, folder / "run", 3)
    assert (code, other_code, nothing) == (0, 0, "")
    assert "step 3: no difference" in words
    assert "update/loss" in words and "update/grad_norm" in words
    fingerprints = read_fingerprints(folder / "run/rollouts", 3, num_ranks=2)
    assert fingerprints is not None
    assert {name.split("/")[1] for name in fingerprints[0].gradients} == {"1", "2"}


PARTIAL = ("rollout.oversample_fraction=0.5", "rollout.partial=true", "run.deterministic=false")


@pytest.mark.slow
@needs_expert_plans
def test_a_mixture_takes_the_routes_of_the_engine_or_of_its_first_pass(folder: Path) -> None:
    """With experts on two ranks, with rollouts that go on in the next step, and computed again."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save_qwen3_moe(folder / "mixture", vocab_size=len(tokenizer), num_experts=8, **ids)
    tokenizer.save_pretrained(folder / "mixture")
    model = f"model.path={folder}/mixture"
    for name, num_ranks, kind, others in (
        ("r3", 2, "R3", ("parallel.ep=2", "model.gradient_checkpointing=full")),
        ("r2", 1, "R2", ()),
        ("partial", 1, "R3", PARTIAL),
    ):
        train_on(num_ranks, folder, model, f"run.name={name}", f"correction.router_replay={kind}", *others)
        area = "mismatch" if kind == "R3" else "update"
        for row in rows(folder / name)[1:]:
            assert row[f"{area}/router_replayed_fraction"] == 1.0
            assert 0.0 <= row[f"{area}/router_disagree_fraction"] < 0.5
        if kind == "R3" and not others[0].startswith("rollout"):
            (code, words), _ = run_ranks(num_ranks, replayed, folder / name, 3)
            assert code == 0 and "step 3: no difference" in words


def now(run: Path, step: int) -> list[StepFingerprint]:
    return replay.replay(run, step).now


def test_on_another_number_of_ranks_it_differs_by_rounding(folder: Path) -> None:
    before = read_fingerprints(folder / "run/rollouts", 1, num_ranks=2)
    assert before is not None
    ((found,),) = run_ranks(1, now, folder / "run", 1)
    apart = difference(before, [found])
    assert not apart.same_parts
    assert apart.advantages < 1e-6 and max(apart.numbers.values()) < 1e-5


def test_what_was_changed_is_told(folder: Path) -> None:
    """Of a run on one rank that keeps one step, and trains a critic too: first nothing, then a reward."""
    train_on(1, folder, "run.name=alone", "run.num_steps=2", "advantage.estimator=gae", "debug.save_rollouts=1")
    assert recorded_steps(folder / "alone/rollouts") == [2]
    ((code, words),) = run_ranks(1, replayed, folder / "alone", 2)
    assert code == 0 and "step 2: no difference" in words and "critic/loss" in words
    path = folder_of(folder / "alone/rollouts", 2) / "rank-0.safetensors"
    recording = read_part(path)
    (rollout, outcome), *others = recording.outcomes
    better = dataclasses.replace(outcome, reward=outcome.reward + 1)
    write_part(path, dataclasses.replace(recording, outcomes=((rollout, better), *others)))
    ((code, words),) = run_ranks(1, replayed, folder / "alone", 2)
    assert code == 1 and "step 2: different" in words
    assert "weights before the step: all" in words and "of its norm" in words


# With a pass for the old log-probabilities, and without.
@pytest.mark.parametrize("updates_per_step", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_the_mismatch_that_is_kept_for_each_token_is_the_one_reported(folder: Path, updates_per_step: int) -> None:
    name = f"updates-{updates_per_step}"
    train_on(2, folder, f"run.name={name}", "run.num_steps=1", f"loss.updates_per_step={updates_per_step}")
    trainers = read_trainer_logprobs(folder / name / "rollouts", 1, num_ranks=2)
    parts = read_parts(folder / name / "rollouts", 1)
    collected = as_collected(parts, group_size=parts[0].config["rollout"]["group_size"])
    mismatch = []
    for rollout, _ in (outcome for part in parts for outcome in part.outcomes):
        (trajectory,) = rollout.trajectories
        logprobs, sampled = torch.tensor(trajectory.logprobs), torch.tensor(trajectory.trained)
        kept = trainers[collected.index_of(rollout), trajectory.token_ids]
        assert torch.equal(kept.isnan(), ~sampled)
        mismatch.append((kept - logprobs)[sampled])
    row = json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[-1])
    sizes = torch.cat(mismatch).abs()
    assert row["mismatch/max_abs_nats"] == float(sizes.max()) > 0
    assert row["mismatch/mean_abs_nats"] == pytest.approx(float(sizes.mean()), rel=1e-5)
    assert runs.episodes([str(folder / name), "--step", "1"]) == 0


def test_a_step_in_which_training_diverged_does_so_again(folder: Path) -> None:
    train_on(1, folder, "run.name=diverged", "mismatch.stop.mean_abs_nats=1e-12", exit_code=3)
    assert run_ranks(1, replayed, folder / "diverged", 1) == [(3, "")]


def test_recorded_rollouts_train_what_the_run_trained(folder: Path) -> None:
    train_on(2, folder, "run.name=again", reading(folder / "run/rollouts"))
    run, again = (load_file(folder / name / "hf/model.safetensors") for name in ("run", "again"))
    assert run.keys() == again.keys()
    for name in run:
        assert torch.equal(run[name], again[name]), name
    rows = [
        [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("run", "again")
    ]
    for row, row_again in zip(*rows, strict=True):
        names = {name for name in row if name.split("/")[0] in ("reward", "batch", "mismatch", "update")}
        assert len(names) > 20 and {name: row[name] for name in names} == {name: row_again[name] for name in names}


def test_what_cannot_be_done_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = 'eval={ num_prompts = 2, sources = [{ kind = "reasoning_gym", task = "chain_sum" }] }'
    for overrides, words in (
        (["debug.load_rollouts=x"], "debug: load_rollouts reads what save_rollouts would write"),
        ([reading(folder / "model")], "holds no rollouts"),
        ([reading(folder / "run/rollouts"), "rollout.group_size=2"], "rollout.group_size = 4, but now it is 2"),
        ([reading(folder / "run/rollouts"), held_out], "nobody can answer the held-out prompts"),
        (
            [reading(folder / "run/rollouts"), "rollout.placement=disaggregated", "rollout.num_ranks=1"],
            "would have nothing to do",
        ),
    ):
        assert train.main([str(folder / "c.toml"), "--dry-run", *overrides]) == 2
        assert words in capsys.readouterr().err
    # Two checkpoints are kept: of steps 2 and 3.
    assert replay.main([str(folder / "run"), "--step", "2"]) == 2
    assert (
        "has no checkpoint of step 1, whose weights it began with; steps that can be: 1, 3" in capsys.readouterr().err
    )
    assert replay.main([str(folder / "run"), "--step", "4"]) == 2
    assert "no rollouts of step 4; the steps it holds: 1, 2, 3" in capsys.readouterr().err
