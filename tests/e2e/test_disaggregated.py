"""Ranks that only train and ranks that only hold engines: in step they do what colocated ranks do, bit for bit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import tomlkit

from spmdrl.train import main
from tests.helpers.judges import judge_server
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    rows,
    sample_rows,
    start_torchrun,
    steady_rows,
)

APART = ('rollout.placement="disaggregated"', "report.samples_per_step=100")
IN_STEP = "rollout.max_staleness=0"
JUDGED = (
    "reward.terms=[{kind='judge',url='policy',max_question_tokens=180,max_answer_tokens=20,temperature=1.0,"
    "template='{rubric} {response}',rubric='Rate',score_pattern='([0-9])',highest=9.0}]",
    "eval.success_at=0.5",
)
FP8 = ("rollout.quantization=fp8", "correction.kind=tis", "debug.assert_on_policy=false")


def samples(run: Path) -> list[dict]:
    """Every rollout of every step."""
    return [row for row in sample_rows(run) if "response" in row]


def tokens(run: Path) -> list[tuple]:
    names = ("step", "prompt_id", "sample_index", "response", "reward", "version")
    return [tuple(sample[name] for name in names) for sample in samples(run)]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """One rank that trains and samples."""
    launch(folder, 1, "run.name=alone", "report.samples_per_step=100")
    return folder / "runs/alone"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), FP8, JUDGED], ids=["as_it_is", "fp8", "judged_by_the_policy"])
def test_in_step_it_is_the_colocated_run_bit_for_bit(folder: Path, alone: Path, settings: tuple[str, ...]) -> None:
    if settings:
        alone = folder / f"runs/alone-{settings is FP8}"
        launch(folder, 1, f"run.name={alone.name}", "report.samples_per_step=100", *settings)
    if settings is FP8:
        assert rows(alone)[1]["mismatch/max_abs_nats"] > 1e-3, "the engine samples with the trainer's own numbers"
    if settings is JUDGED:
        assert {sample["reward"] for sample in samples(alone)} > {0.0}, "the policy has given no score"
    apart = alone.with_name(alone.name.replace("alone", "apart"))
    launch(folder, 2, f"run.name={apart.name}", *APART, IN_STEP, "rollout.num_ranks=1", *settings)
    assert samples(apart) == samples(alone)
    assert steady_rows(apart) == steady_rows(alone)
    assert_same_weights(alone, apart)
    assert json.loads((apart / "plan.json").read_text())["steps_ahead"] == 0


@pytest.mark.parametrize("engine_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_any_number_of_ranks_samples_the_same(folder: Path, alone: Path, engine_ranks: int) -> None:
    name = f"apart-{engine_ranks}-of-3"
    launch(folder, 3, f"run.name={name}", *APART, IN_STEP, f"rollout.num_ranks={engine_ranks}", "run.num_steps=2")
    # The first rank writes the samples that it holds itself.
    written = tokens(folder / "runs" / name)
    assert written and set(written) <= set(tokens(alone))
    for one, other in zip(rows(alone)[:3], rows(folder / "runs" / name), strict=True):
        for metric in ("reward/mean", "rollout/response_tokens", "batch/loss_tokens", "eval/reward"):
            if metric in one and one["step"] < 2:
                assert one[metric] == pytest.approx(other[metric], rel=1e-12), metric
        if one["step"]:
            assert one["update/grad_norm"] == pytest.approx(other["update/grad_norm"], rel=1e-4)
            assert "time/sampling_s" in other


@pytest.mark.slow
@pytest.mark.parametrize("is_judged", [False, True])
def test_evaluations_beside_rollouts_are_those_of_the_colocated_run(folder: Path, alone: Path, is_judged: bool) -> None:
    """Also where a judge sees all answers to a prompt."""
    run = folder / f"runs/beside-{is_judged}"
    free = (f"run.name={run.name}", *APART, IN_STEP, "rollout.num_ranks=1", "run.deterministic=false")
    with judge_server() as server:
        term = tomlkit.item(server.term(group="scores"), _parent=tomlkit.array()).as_string()
        judged = (f"reward.terms=[{term}]", "eval.samples_per_prompt=2") if is_judged else ()
        launch(folder, 2, *free, *judged)
        if is_judged:
            alone = folder / "runs/alone-and-judged"
            launch(folder, 1, f"run.name={alone.name}", "report.samples_per_step=100", *judged)
    assert tokens(run) == tokens(alone)
    evaluated = [[row for row in rows(one) if "eval/reward" in row] for one in (alone, run)]
    assert [row["step"] for row in evaluated[0]] == [row["step"] for row in evaluated[1]] == [0, 2, 4]
    for one, other in zip(*evaluated, strict=True):
        for metric in ("eval/reward", "eval/accuracy", "eval/response_tokens"):
            assert one[metric] == other[metric]


def test_a_step_ahead(folder: Path) -> None:
    settings = ("run.name=ahead", *APART, "rollout.num_ranks=1", "run.num_steps=4")
    launch(folder, 2, *settings)
    run = folder / "runs/ahead"
    steps = rows(run)[1:]
    assert [row["rollout/max_staleness_steps"] for row in steps] == [0, 1, 1, 1]
    assert [row["rollout/mean_staleness_steps"] for row in steps] == [0, 1, 1, 1]
    assert {(sample["step"], sample["version"]) for sample in samples(run)} == {
        (step, max(0, step - 2)) for step in range(1, 5)
    }
    # What is stale shows as mismatch; the probe is answered by the weights that are updated.
    assert max(row["mismatch/max_abs_nats"] for row in steps) > 1e-3
    assert max(row["refit/probe_max_abs_nats"] for row in steps) < 1e-5
    # Evaluations are of the weights of their step, as everywhere.
    assert [row["step"] for row in rows(run) if "eval/accuracy" in row] == [0, 2, 4]
    again = folder / "runs/again"
    launch(folder, 2, *settings, "run.name=again")
    assert tokens(again) == tokens(run)
    assert steady_rows(again) == steady_rows(run)


@pytest.mark.slow
def test_a_run_that_stopped_in_step_is_bitwise_the_run_that_did_not(folder: Path, alone: Path) -> None:
    settings = ("run.name=stopped-apart", *APART, IN_STEP, "rollout.num_ranks=1")
    launch(folder, 2, *settings, "run.num_steps=2")
    launch(folder, 2, *settings)
    stopped = folder / "runs/stopped-apart"
    assert tokens(stopped) == tokens(alone)
    assert_same_weights(alone, stopped)


@pytest.mark.slow
def test_a_run_that_stopped_ahead_goes_on_with_the_same_prompts(folder: Path) -> None:
    """Two steps ahead, with groups that go on, groups that are drawn in place of others, and greedy responses."""
    settings = (
        "run.name=stopped-ahead",
        *APART,
        "advantage.estimator=remax",
        "run.deterministic=false",
        "rollout.num_ranks=1",
        "rollout.dynamic_sampling=true",
        "rollout.oversample_fraction=0.5",
        "rollout.partial=true",
        "rollout.max_staleness=3",
        "correction.kind=tis",
        "rollout.max_response_tokens=24",
        "rollout.max_running=12",
        "checkpoint.every=1",
        "checkpoint.keep_last=6",
    )
    launch(folder, 2, *settings, "run.num_steps=3")
    launch(folder, 2, *settings, "run.num_steps=6")
    run = folder / "runs/stopped-ahead"
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3, 4, 5, 6]
    assert all(row["rollout/max_staleness_steps"] <= 3 for row in rows(run)[1:])
    used = [(sample["prompt_id"], sample["sample_index"]) for sample in samples(run)]
    assert len(used) == len(set(used)), "a prompt was trained on twice"
    assert all(sample["advantage"] == sample["reward"] - sample["greedy_reward"] for sample in samples(run))


def _said(argv: list[str]) -> tuple[int, str]:
    """The exit code of one rank, and what it says of an error."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return main(argv), said.getvalue()


@pytest.mark.slow
def test_what_stops_the_engines_is_told_by_the_ranks_that_train(folder: Path) -> None:
    settings = ("run.name=changed", *APART, "run.deterministic=false", "rollout.num_ranks=1")
    partial = ("rollout.oversample_fraction=0.5", "rollout.partial=true", "rollout.max_running=12")
    launch(folder, 2, *settings, *partial, "rollout.max_response_tokens=24", "run.num_steps=2")
    changed = ("rollout.max_response_tokens=20", 'resume.changed=["rollout.max_response_tokens"]')
    codes, said = zip(*run_ranks(2, _said, [str(folder / "c.toml"), *settings, *partial, *changed]), strict=True)
    assert codes == (2, 2)
    assert any("max_response_tokens was 24 and is 20" in words for words in said)
    assert not any("spmdrl/rollout" in words for words in said), "a traceback"


@pytest.mark.slow
def test_the_death_of_an_engine_rank_ends_the_run(folder: Path) -> None:
    settings = ("run.name=killed", *APART, "rollout.num_ranks=1", "run.num_steps=100000")
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    launched = start_torchrun(2, str(folder / "c.toml"), *settings, **streams)
    try:
        metrics = folder / "runs/killed/metrics.jsonl"
        began = time.monotonic()
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert launched.poll() is None and time.monotonic() - began < 120
            time.sleep(0.2)
        (victim,) = [
            process for process in psutil.Process(launched.pid).children() if process.environ().get("RANK") == "1"
        ]
        victim.send_signal(signal.SIGKILL)
        _, said = launched.communicate(timeout=60)
    finally:
        launched.terminate()  # torchrun then ends its ranks; after a kill they would stay
        launched.wait()
    assert launched.returncode != 0
    assert f"rank 1 ({os.uname().nodename}, pid {victim.pid}) ended without an error message" in said
