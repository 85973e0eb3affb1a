"""Whole runs that sample with SGLang, from the command line; what they share with other engines is in tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.small_run import rows, sample_rows, torchrun, write_small_run

pytestmark = pytest.mark.slow

SETTINGS = (
    "run.deterministic=false",
    "rollout.engine=sglang",
    "rollout.temperature=0.7",
    "debug.assert_on_policy=false",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_small_run(tmp_path, model={"hidden_size": 128, "num_layers": 2})
    return tmp_path


def test_rollouts_go_on_in_the_next_step_and_in_the_next_launch(folder: Path) -> None:
    """Over-sampling, dynamic sampling and partial rollouts; everything that can leave memory does; another number of
    engines in the second launch."""
    settings = (
        *SETTINGS,
        "rollout.dynamic_sampling=true",
        "rollout.oversample_fraction=0.5",
        "rollout.partial=true",
        "rollout.max_staleness=2",
        "correction.kind=tis",
        "rollout.max_response_tokens=64",  # so long that some are always unfinished when the step has enough
        "rollout.max_running=6",
        "offload.trainer=all",
        'offload.engine=["kv_cache", "weights"]',
        "checkpoint.every=1",
    )
    torchrun(folder, 2, *settings, "run.num_steps=4")
    torchrun(folder, 1, *settings, "run.num_steps=6")
    steps = rows(folder / "runs/run")[1:]
    assert [row["step"] for row in steps if "update/loss" in row] == list(range(1, 7))
    for row in steps:
        assert row["rollout/kept_groups_fraction"] == 1.0
        assert row["rollout/max_staleness_steps"] <= 2
        assert row["refit/probe_max_abs_nats"] < 1e-5
    assert any(row["rollout/aborted_tokens"] for row in steps)
    assert any(row["rollout/continued_count"] for row in steps)


def test_ranks_train_while_an_engine_on_two_others_samples(folder: Path) -> None:
    apart = ('rollout.placement="disaggregated"', "rollout.num_ranks=2", "rollout.tp_size=2", "rollout.max_staleness=1")
    torchrun(folder, 3, *SETTINGS, *apart)
    steps = [row for row in rows(folder / "runs/run") if "update/loss" in row]
    assert [row["rollout/max_staleness_steps"] for row in steps] == [0, 1, 1, 1]
    assert all(row["refit/probe_max_abs_nats"] < 1e-5 for row in steps)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_policy_judges_its_own_responses(folder: Path, num_ranks: int) -> None:
    """On both ranks, and disaggregated by the engine of two ranks."""
    apart = ('rollout.placement="disaggregated"', "rollout.num_ranks=2", "rollout.tp_size=2", "rollout.max_staleness=0")
    judge = (
        "reward.terms=[{kind='judge',url='policy',max_question_tokens=180,max_answer_tokens=20,temperature=1.0,"
        "template='{rubric} {response}',rubric='Rate',score_pattern='([0-9])',highest=9.0}]",
        "eval.success_at=0.5",
        "report.samples_per_step=100",
    )
    torchrun(folder, num_ranks, *SETTINGS, *judge, *(apart if num_ranks == 3 else ()))
    run = folder / "runs/run"
    steps = [row for row in rows(run) if "update/loss" in row]
    assert len(steps) == 4 and all(row["reward/mean"] > 0 and row["reward/failed_count"] < 32 for row in steps)
    rewards = {row["reward"] for row in sample_rows(run) if "response" in row}
    assert {0.0} < rewards <= {digit / 9 for digit in range(10)}
    said = [path.read_text().count("\n") for path in sorted((run / "judged/policy").iterdir())]
    assert len(said) == (2 if num_ranks == 2 else 1) and min(said) > 20
