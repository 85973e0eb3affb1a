"""Runs with adapters: the engine gets them alone, and samples what it would sample from merged weights' trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.small_run import assert_same_weights, launch, rows, sample_rows, steady_rows

LORA = ("lora.rank=4", "report.samples_per_step=100")
APART = ('rollout.placement="disaggregated"', "rollout.num_ranks=1")
IN_STEP = "rollout.max_staleness=0"


def tokens(run: Path) -> list[tuple]:
    names = ("step", "prompt_id", "sample_index", "response", "reward", "version")
    return [tuple(row[name] for name in names) for row in sample_rows(run) if "response" in row]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """One rank that trains and samples."""
    launch(folder, 1, "run.name=alone", *LORA)
    return folder / "runs/alone"


def test_the_engine_has_the_version_of_each_step(alone: Path) -> None:
    assert {(row["step"], row["version"]) for row in sample_rows(alone) if "response" in row} == {
        (step, step - 1) for step in range(1, 5)
    }
    steps = rows(alone)[1:]
    assert all(row["mismatch/max_abs_nats"] <= 1e-5 for row in steps)
    assert all(row["update/grad_norm"] > 0 for row in steps)


@pytest.mark.slow
def test_disaggregated_in_step_it_is_the_colocated_run_bit_for_bit(folder: Path, alone: Path) -> None:
    launch(folder, 2, "run.name=apart", *LORA, *APART, IN_STEP)
    apart = folder / "runs/apart"
    assert tokens(apart) == tokens(alone)
    assert steady_rows(apart) == steady_rows(alone)
    assert_same_weights(alone, apart)


@pytest.mark.slow
def test_a_disaggregated_run_that_stopped_is_bitwise_the_run_that_did_not(folder: Path, alone: Path) -> None:
    settings = ("run.name=stopped", *LORA, *APART, IN_STEP)
    launch(folder, 2, *settings, "run.num_steps=2")
    launch(folder, 2, *settings)
    stopped = folder / "runs/stopped"
    assert tokens(stopped) == tokens(alone)
    assert_same_weights(alone, stopped)


def test_engines_two_steps_ahead(folder: Path) -> None:
    """Nobody waits for a refit: a step has tokens of the versions that its engine had."""
    ahead = ("rollout.max_staleness=2", "correction.kind=tis", "run.deterministic=false", "run.num_steps=6")
    launch(folder, 2, "run.name=ahead", *LORA, *APART, *ahead)
    steps = rows(folder / "runs/ahead")[1:]
    assert json.loads((folder / "runs/ahead/plan.json").read_text())["steps_ahead"] == 2
    assert all(row["rollout/max_staleness_steps"] <= 2 for row in steps)
    assert max(row["refit/probe_max_abs_nats"] for row in steps) < 1e-5


def test_with_exact_kernels_the_mismatch_is_0(folder: Path) -> None:
    launch(folder, 1, "run.name=exact", *LORA, "true_on_policy=true", "run.num_steps=2")
    assert [row["mismatch/max_abs_nats"] for row in rows(folder / "runs/exact")[1:]] == [0.0] * 2


@pytest.mark.slow
def test_merged_weights_sample_what_adapters_sample(folder: Path, alone: Path) -> None:
    """To rounding: the log-probabilities of the first steps' tokens."""
    launch(folder, 1, "run.name=merged", *LORA, "lora.merge=true", "run.num_steps=2")
    merged = rows(folder / "runs/merged")[1:]
    assert all(row["mismatch/max_abs_nats"] <= 1e-5 for row in merged)
    assert [row["reward/mean"] for row in merged] == [row["reward/mean"] for row in rows(alone)[1:3]]
