"""Runs whose rollouts go on across training repeat, resume after kills and are computed again, bit for bit."""

from __future__ import annotations

import random
import signal
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from spmdrl.checkpoint.manifest import newest_step, saved_steps
from spmdrl.report.files import read_rows
from spmdrl.tools import replay
from tests.helpers.cuts import after_phases, cut, entering, nowhere
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import assert_same_weights, launch, sample_rows, steady_rows

pytestmark = pytest.mark.timeout(1800)  # several runs each, beside other work
SETTINGS = (
    "rollout.partial=true",
    "correction.kind=tis",
    "rollout.max_response_tokens=48",
    "rollout.max_running=12",
    "run.num_steps=5",
    "eval.every=1",
    "checkpoint.every=1",
    "checkpoint.keep_last=8",
    "report.samples_per_step=100",
)
COLOCATED = (2, "rollout.max_staleness=2")
APART = (3, 'rollout.placement="disaggregated"', "rollout.num_ranks=2", "rollout.max_staleness=3")
IN_FLIGHT = (*APART[:3], "rollout.refit_in_flight=true", "rollout.refit_after_tokens=16", "rollout.max_staleness=4")
KILLS = ((2, "update"), (3, "rollout"), (4, "refit"), (5, "batch"))


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, samples, schedules, and every metric but those of time and memory."""
    assert steady_rows(one) == steady_rows(other)
    assert sample_rows(one) == sample_rows(other)
    assert (one / "schedule.jsonl").read_text() == (other / "schedule.jsonl").read_text()
    assert_same_weights(one, other)


def trained(row: dict[str, Any]) -> list[int]:
    """The prompts that a step trained on, by its row of the schedule."""
    return [prompt for engine in row["engines"] for prompt in engine["trained"]]


@pytest.mark.slow
@pytest.mark.parametrize("place", [COLOCATED, APART, IN_FLIGHT], ids=["together", "apart", "in-flight"])
def test_a_deterministic_run_repeats_and_resumes_after_kills_bit_for_bit(
    folder: Path, place: tuple[int, *tuple[str, ...]], request: pytest.FixtureRequest
) -> None:
    num_ranks, *settings = place
    name = request.node.callspec.id
    settings = [*SETTINGS, *settings]
    recorded = ("debug.save_rollouts=all",)
    launch(folder, num_ranks, *settings, *recorded, f"run.name={name}-whole")
    whole = folder / f"runs/{name}-whole"
    limit = int(settings[-1].rpartition("=")[2])
    steps = steady_rows(whole)[1:]
    oldest = max(row["rollout/max_staleness_steps"] for row in steps)
    assert oldest == (2 if place == IN_FLIGHT else limit)  # newer weights come early, and rows are few
    assert all(row["rollout/discarded_tokens"] == row["rollout/stale_groups_count"] == 0 for row in steps)
    assert sum(row["rollout/continued_count"] for row in steps) > 0
    at = [engine.get("refit_at") for row in read_rows(whole / "schedule.jsonl") for engine in row["engines"]]
    assert any(at) == (place == IN_FLIGHT) and max(tokens or 0 for tokens in at) <= 16
    for row in read_rows(whole / "schedule.jsonl"):
        assert sorted(trained(row)) == list(range(8 * row["step"] - 8, 8 * row["step"]))

    launch(folder, num_ranks, *settings, f"run.name={name}-again")
    assert_same_run(whole, folder / f"runs/{name}-again")

    killed = folder / f"runs/{name}-killed"
    argv = [str(folder / "c.toml"), *settings, f"run.name={name}-killed"]
    for number, (step, phase) in enumerate(KILLS):
        if num_ranks == 3 and phase == "rollout":
            continue  # where an engine has no phase of that name in the step of the trainer
        with pytest.raises(AssertionError, match="died without a word"):
            patch = partial(entering, step, phase, signal.SIGKILL, number % 2 if num_ranks == 2 else 0)
            run_ranks(num_ranks, cut, argv, patch, timeout_s=600.0)
        assert (newest_step(killed / "checkpoints") or 0) < step
    assert set(run_ranks(num_ranks, cut, argv, nowhere, timeout_s=600.0)) == {0}
    assert_same_run(whole, killed)

    with redirect_stdout(StringIO()) as said:
        codes = run_ranks(2 if num_ranks == 2 else 1, replay.main, [str(whole), "--step", "4"])
    assert set(codes) == {0}, said.getvalue()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_20_kills_at_random_moments_change_no_bit(folder: Path) -> None:
    """Where refits are in flight: an engine rank beside one that trains, one of which is killed."""
    retained = ("checkpoint.keep_last=2", "checkpoint.keep_best=eval/reward")
    settings = (*SETTINGS, *IN_FLIGHT[1:], "rollout.num_ranks=1", "run.num_steps=8", *retained)
    launch(folder, 2, *settings, "run.name=unharmed")
    steps = saved_steps(folder / "runs/unharmed/checkpoints")
    rewards = {row["step"]: row["eval/reward"] for row in steady_rows(folder / "runs/unharmed")[1:]}
    assert steps == sorted({7, 8, max(rewards, key=lambda step: (rewards[step], -step))})
    moments, num_kills = random.Random(37), 0
    while num_kills < 20:
        name = f"killed-after-{num_kills}"
        argv = [str(folder / "c.toml"), *settings, f"run.name={name}"]
        while True:  # the last launch of a run is the one that comes to its end
            moment = (moments.randint(1, 24), moments.random(), moments.randrange(2))
            try:
                patch = partial(after_phases, *moment) if num_kills < 20 else nowhere
                assert set(run_ranks(2, cut, argv, patch, timeout_s=600.0)) == {0}
                break
            except AssertionError as error:
                assert "died without a word" in str(error), error
                num_kills += 1
        assert_same_run(folder / "runs/unharmed", folder / f"runs/{name}")
        assert saved_steps(folder / f"runs/{name}/checkpoints") == steps


@pytest.mark.slow
def test_with_staleness_0_it_is_the_run_in_step_bit_for_bit(folder: Path) -> None:
    settings = ("run.num_steps=3", "report.samples_per_step=100")
    launch(folder, 2, *settings, "run.name=in-step")
    launch(folder, 2, *settings, "run.name=open-0", "rollout.partial=true", "rollout.max_staleness=0")
    one, other = folder / "runs/in-step", folder / "runs/open-0"
    assert steady_rows(one) == steady_rows(other) and sample_rows(one) == sample_rows(other)
    assert_same_weights(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("place", [COLOCATED, IN_FLIGHT], ids=["together", "in-flight"])
def test_a_free_run_trains_on_the_same_prompts_in_the_same_steps_and_its_schedule_repeats_it(
    folder: Path, place: tuple[int, *tuple[str, ...]], request: pytest.FixtureRequest
) -> None:
    num_ranks, *settings = place
    name = request.node.callspec.id
    settings = [*SETTINGS, *(one for one in settings if "after_tokens" not in one), "run.deterministic=false"]
    settings += ["rollout.cache_after_refit=keep", *(["offload.engine=[]"] if num_ranks == 2 else [])]
    launch(folder, num_ranks, *settings, f"run.name={name}-free")
    run = folder / f"runs/{name}-free"
    follows = f"debug.follow_schedule={run}/schedule.jsonl"
    launch(folder, num_ranks, *settings, f"run.name={name}-followed", follows)
    assert_same_run(run, folder / f"runs/{name}-followed")
    assert all(row["rollout/discarded_tokens"] == 0 for row in steady_rows(run)[1:])
    for row in read_rows(run / "schedule.jsonl"):
        assert sorted(trained(row)) == list(range(8 * row["step"] - 8, 8 * row["step"]))
        assert all(("refit_at" in engine) == (num_ranks == 3 and row["step"] > 1) for engine in row["engines"])
