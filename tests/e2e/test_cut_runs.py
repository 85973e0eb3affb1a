"""A run with everything on, cut at many places, is bit for bit the run that nothing cut.

Everything: episodes of several turns whose environment shows pictures, adapters on a vision model with a reference,
groups that are drawn in place of others, a judge of every response, evaluation on held-out questions, exports on the
way. Runs with one feature
alone are cut by the slow tests of the other files.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spmdrl.checkpoint import write
from spmdrl.checkpoint.manifest import newest_step, saved_steps
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.rollout.episode import Episode
from tests.helpers import painter
from tests.helpers.cuts import Step, cut, entering, nowhere
from tests.helpers.judges import JudgeServer, judge_server
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import assert_same_weights, rows, sample_rows, steady_rows
from tests.helpers.vision import write_picture_run

SETTINGS = (
    f'environment.source={{kind="class",name="{painter.__file__}:Painter"}}',
    "lora.rank=4",
    "rollout.dynamic_sampling=true",
    "loss.kl_coef=0.01",
    "run.num_steps=3",
    "rollout.prompts_per_step=4",
    "checkpoint.keep_last=20",
    "export.every=2",
    "report.samples_per_step=100",
    "report.tensorboard=false",
)
APART = ('rollout.placement="disaggregated"', "rollout.num_ranks=1", "rollout.max_staleness=0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cut")
    write_picture_run(path, eval={"num_prompts": 2, "every": 2})
    return path


def in_an_episode(step: int, rank: int) -> None:
    """Kill a rank when an environment of a step has answered a turn, and other episodes are under way."""
    take_answer, cut_step = Episode.take_answer, Step(step, rank)

    def take_answer_or_die(episode: Episode) -> None:
        take_answer(episode)
        if cut_step.is_now and episode.turns:
            cut_step.die()

    Episode.take_answer = take_answer_or_die


def before_the_name(step: int) -> None:
    """Kill the rank that publishes a checkpoint when all of its files have been written."""
    publish = write._publish

    def publish_or_die(unfinished: Path, final: Path) -> Any:
        if f"{step:08d}" in final.name:
            os.kill(os.getpid(), KILL)
        return publish(unfinished, final)

    write._publish = publish_or_die


# Each launch resumes the one before: where it is cut, the rank that is killed or none, and the step that is saved.
USR1, KILL = signal.SIGUSR1, signal.SIGKILL
COLOCATED = (
    (partial(in_an_episode, 2, rank=1), 1, 1),
    (partial(before_the_name, 2), 0, 1),
    (partial(entering, 2, "update", USR1, rank=1), None, 2),
    (partial(entering, 3, "update", KILL, rank=1), 1, 2),
    (partial(entering, 3, "refit", USR1, rank=0), None, 3),
)
DISAGGREGATED = (
    (partial(in_an_episode, 1, rank=1), 1, 0),
    (partial(entering, 2, "reward", USR1, rank=1), None, 1),
    (partial(entering, 3, "refit", USR1, rank=0), None, 3),
)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[JudgeServer]:
    """Judges, which know the runs by their names."""
    with judge_server() as server:
        os.environ["JUDGE_URL"] = server.url
        yield server
        del os.environ["JUDGE_URL"]


def launch(folder: Path, num_ranks: int, *overrides: str, patch: Callable[[], None] = nowhere) -> None:
    name = overrides[0].removeprefix("run.name=")
    judge = f'{{kind="judge",weight=0.0,rubric="Be right.",url="{os.environ["JUDGE_URL"]}",model="{name}"}}'
    argv = [str(folder / "c.toml"), *SETTINGS, f'reward.terms=[{{kind="environment"}},{judge}]', *overrides]
    assert set(run_ranks(num_ranks, cut, argv, patch, timeout_s=200.0)) == {0}


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, samples, exports, and every metric but those of time and memory."""
    assert_same_weights(one, other)
    assert steady_rows(one) == steady_rows(other)
    assert (one / "samples.jsonl").read_text() == (other / "samples.jsonl").read_text()
    exports = [sorted(path.name for path in run.glob("hf-*")) for run in (one, other)]
    assert exports == [["hf-00000002"]] * 2


def cut_run(folder: Path, name: str, cuts: Sequence[tuple[partial[None], int | None, int]], *overrides: str) -> Path:
    """A run on two ranks that is launched again after each of its cuts, to the end."""
    run, settings = folder / "runs" / name, (f"run.name={name}", *overrides)
    files, checkpoints = FaultFiles(run), run / "checkpoints"
    for patch, killed, saved in cuts:
        if killed is None:
            launch(folder, 2, *settings, patch=patch)
            requeue = read_requeue(files)
            assert requeue is not None and (requeue.reason, requeue.step) == ("SIGUSR1", saved), patch
        else:
            with pytest.raises(AssertionError, match="died without a word"):
                launch(folder, 2, *settings, patch=patch)
            report = read_error(files)
            assert report is not None and (report.kind, report.rank) == ("lost", killed), patch
            assert "ended without an error message" in report.message, patch
        assert (newest_step(checkpoints) or 0) == saved, patch
        assert set(saved_steps(checkpoints)) <= set(range(saved + 1)), patch
    launch(folder, 2, *settings)
    assert read_requeue(files) is None and read_error(files) is None
    assert not list(checkpoints.glob("*.*"))
    return run


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """One rank that trains and samples, and that nothing stops."""
    launch(folder, 1, "run.name=alone")
    return folder / "runs/alone"


@pytest.fixture(scope="module")
def pair(folder: Path) -> Path:
    """Two such ranks."""
    launch(folder, 2, "run.name=pair")
    return folder / "runs/pair"


def first_samples(run: Path) -> set[tuple[Any, ...]]:
    """What the first step sampled, as far as the first rank has written it."""
    names = ("prompt_id", "sample_index", "response", "reward", "advantage", "end", "version")
    return {tuple(row[name] for name in names) for row in sample_rows(run) if row["step"] == 1 and "response" in row}


def test_everything_is_on(pair: Path) -> None:
    steps = rows(pair)[1:]
    assert len(steps) == 3 and all(0 < row["mismatch/max_abs_nats"] < 1e-5 for row in steps)
    assert all(row["update/grad_norm"] > 0 and row["images/distinct"] > 3 for row in steps)
    assert all(row["images/tower_passes"] > 0 and row["rollout/kept_groups_fraction"] == 1.0 for row in steps)
    assert sum(row["rollout/equal_groups_count"] for row in steps) > 0, "no group was drawn in place of another"
    prompts = [{row["prompt_id"] for row in sample_rows(pair) if row["step"] == step} for step in (1, 2, 3)]
    assert len(set.union(*prompts)) == sum(map(len, prompts)), "a prompt was trained on twice"
    assert steps[0]["update/k3_ref_nats"] < steps[-1]["update/k3_ref_nats"]
    assert [row["step"] for row in rows(pair) if "eval/reward" in row] == [0, 2, 3]


@pytest.mark.slow
def test_one_rank_samples_what_two_sample(alone: Path, pair: Path) -> None:
    assert first_samples(pair) and first_samples(pair) <= first_samples(alone)
    for name in ("reward/mean", "rollout/response_tokens", "batch/loss_tokens"):
        assert rows(alone)[1][name] == pytest.approx(rows(pair)[1][name], rel=1e-12), name
    assert rows(alone)[1]["update/grad_norm"] == pytest.approx(rows(pair)[1]["update/grad_norm"], rel=1e-5)


def test_colocated(folder: Path, pair: Path, server: JudgeServer) -> None:
    run = cut_run(folder, "colocated", COLOCATED)
    assert_same_run(run, pair)
    counts = [count for (name, _), count in server.asked.items() if name == "colocated"]
    assert sum(counts) < 1.2 * len(counts), "what a judge has said is asked again"
    # A stop leaves no evaluation out and repeats none; the kill in step 3 loses the one after step 2.
    assert [(one / "evaluations").read_text().split() for one in (pair, run)] == [["0", "2", "3"], ["0", "2", "2", "3"]]


@pytest.mark.slow
def test_disaggregated(folder: Path, alone: Path) -> None:
    """Also equal to a run on one rank that does both."""
    assert_same_run(cut_run(folder, "disaggregated", DISAGGREGATED, *APART), alone)
