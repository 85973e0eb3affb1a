"""Whole runs of episodes whose environment shows pictures: engine and trainer see the same in every turn, on any number
of ranks, and in a step that is computed again. `test_cut_runs` resumes such runs."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from spmdrl.rollout.files import read_parts
from spmdrl.tools import replay, runs
from spmdrl.train import main
from spmdrl.types import Rollout
from tests.helpers import painter
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    rows,
    sample_rows,
    without_curves,
)
from tests.helpers.vision import TOKENS, write_picture_run
from tests.helpers.vision_models import IMAGE

EXACT = 1e-5  # nats between engine and trainer
ENVIRONMENT = f'environment.source={{kind="class",name="{painter.__file__}:Painter"}}'
SETTINGS = (ENVIRONMENT, "report.samples_per_step=100", "debug.save_rollouts=all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL, questions of which some have a picture, and the configuration of a small run of episodes."""
    path = tmp_path_factory.mktemp("pictures")
    write_picture_run(path, run={"num_steps": 2}, eval=None)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """Two steps on two ranks that nothing stopped."""
    launch(folder, 2, "run.name=whole", *SETTINGS)
    return folder / "runs/whole"


def rollouts_of(run: Path, step: int) -> dict[tuple[int, int], Rollout]:
    return {
        (rollout.prompt.prompt_id, rollout.sample_index): rollout
        for part in read_parts(run / "rollouts", step)
        for rollout, _ in part.outcomes
    }


def test_pictures_of_every_turn_are_seen_alike_by_engine_and_trainer(whole: Path) -> None:
    shown: set[tuple[int, int]] = set()
    for step in (1, 2):
        for rollout in rollouts_of(whole, step).values():
            (trajectory,) = rollout.trajectories
            placeholders = [place for image in trajectory.images for place in range(image.start, image.end)]
            assert all(trajectory.token_ids[place] == IMAGE and not trajectory.trained[place] for place in placeholders)
            shown |= {(number, len(turn.images)) for number, turn in enumerate(trajectory.turns)}
    assert shown >= {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 0), (2, 2)}, "turns, and images in them"
    # `debug.assert_on_policy` has compared every token of every turn on the way.
    steps = rows(whole)[1:]
    assert all(0 < row["mismatch/max_abs_nats"] < EXACT for row in steps)
    assert all(row["images/distinct"] > 3 for row in steps)


def test_a_file_that_is_no_picture_ends_an_episode_and_not_the_run(whole: Path) -> None:
    fractions = [row["episode/end_environment_error_fraction"] for row in rows(whole)[1:]]
    assert 0 < sum(fractions) < 1
    failed = [row for row in sample_rows(whole) if row["environment_failure"]]
    assert failed and all("8" in row["prompt"] and row["end"] == "environment_error" for row in failed)
    assert all("the image of 10 bytes is damaged" in row["environment_failure"] for row in failed)
    assert not any(turn["trained"] for row in failed for turn in row["turns"])


def test_pages_name_pictures(whole: Path) -> None:
    code, words = told(runs.episodes, str(whole), "--step", "1")
    assert code == 0, words
    (page,) = whole.rglob("*.html")
    rollouts = rollouts_of(whole, 1).values()
    names = {image.name for rollout in rollouts for image in rollout.trajectories[0].images}
    assert names and all(name.strip("<>") in page.read_text() for name in names)
    for row in sample_rows(whole):
        assert not any(TOKENS[IMAGE] in turn["read"] for turn in row["turns"])
    text = (whole / "samples.jsonl").read_text()
    assert all(name in text for name in names)


def told(program: object, *arguments: str) -> tuple[int, str]:
    """The exit code and the words of a program on one rank."""
    words = StringIO()
    with redirect_stdout(words), redirect_stderr(words):
        code = program(list(arguments))  # type: ignore[operator]
    return code, words.getvalue()


@pytest.mark.slow
def test_one_rank_samples_the_episodes_of_two(folder: Path, whole: Path) -> None:
    launch(folder, 1, "run.name=alone", "run.num_steps=1", *SETTINGS)
    alone, pair = (rollouts_of(folder / "runs" / name, 1) for name in ("alone", "whole"))
    assert alone.keys() == pair.keys()
    for place, rollout in alone.items():
        (one,), (other,) = rollout.trajectories, pair[place].trajectories
        assert (one.token_ids, one.images, rollout.end) == (other.token_ids, other.images, pair[place].end)
        assert rollout.observations == pair[place].observations


@pytest.mark.slow
def test_a_step_is_computed_again_to_the_last_bit(whole: Path) -> None:
    """From the files of pictures that the recording has: no environment shows them again."""
    (code, words), _ = run_ranks(2, told, replay.main, str(whole), "--step", "2")
    assert code == 0 and "step 2: no difference" in words, words


@pytest.mark.slow
def test_recorded_rollouts_train_what_the_run_trained(folder: Path, whole: Path) -> None:
    overrides = [f'debug={{ load_rollouts = "{whole}/rollouts" }}', "run.name=read", ENVIRONMENT]
    assert run_ranks(2, without_curves, main, [str(folder / "c.toml"), *overrides]) == [0, 0]
    names = ("update/loss", "update/grad_norm")
    before, after = (
        [[row.get(name) for name in names] for row in rows(folder / "runs" / run)[1:]] for run in ("whole", "read")
    )
    assert before == after and None not in before[0]


@pytest.mark.slow
def test_unfinished_episodes_go_on_in_another_process(folder: Path) -> None:
    settings = (
        *SETTINGS,
        "run.name=partial",
        "run.deterministic=false",
        "rollout.partial=true",
        "rollout.oversample_fraction=0.5",
        "rollout.max_running=4",
        "rollout.stop_token_ids=[1,20,40,60,80]",  # longer responses, so that some are always unfinished
    )
    launch(folder, 2, *settings)
    run = folder / "runs/partial"
    (saved,) = [json.loads(path.read_text()) for path in run.glob("checkpoints/*2/collector.json")]
    observed = [
        observation
        for group in saved["carried"]
        for episode in group["episodes"]
        for observation in (
            episode["greeting"],
            *(turn["observation"] for part in episode["trajectories"] for turn in part),
        )
        if observation
    ]
    assert any(observation["images"] for observation in observed), "no interrupted group has been shown a picture"
    launch(folder, 2, *settings, "run.num_steps=3")
    fresh = [row for row in rows(run)[1:] if not row["rollout/max_staleness_steps"]]
    assert sum(row["rollout/continued_count"] for row in rows(run)[1:]) > 0
    assert all(row["mismatch/max_abs_nats"] < EXACT for row in fresh)


@pytest.mark.slow
def test_apart_is_the_colocated_run_bit_for_bit(folder: Path) -> None:
    """The ranks that train make pixels of the pictures that only others were shown."""
    apart = ('rollout.placement="disaggregated"', "rollout.num_ranks=1", "rollout.max_staleness=0")
    launch(folder, 1, "run.name=colocated", "run.num_steps=1", *SETTINGS)
    launch(folder, 2, "run.name=apart", "run.num_steps=1", *SETTINGS, *apart)
    one, other = folder / "runs/colocated", folder / "runs/apart"
    assert sample_rows(one) == sample_rows(other)
    assert_same_weights(one, other)


def test_what_cannot_be_is_said_before_the_start(folder: Path) -> None:
    (folder / "bad.py").write_text(
        "class Bad:\n    def reset(self):\n        return [{'type': 'image', 'image': b'hello'}]\n"
        "    def step(self, action):\n        return 'on', 0.0, False\n"
    )
    source = f'environment.source={{kind="class",name="{folder}/bad.py:Bad"}}'
    code, words = told(main, str(folder / "c.toml"), "--dry-run", source)
    assert code == 2 and "the environment's first reset shows an image: the image of 5 bytes is damaged" in words, words
    agent = 'environment={source={kind="agent",command=["python"]},sandbox={mode="off"}}'
    code, words = told(main, str(folder / "c.toml"), "--dry-run", agent)
    assert code == 2 and "agents show the policy text only: their prompts are what they ask" in words, words
