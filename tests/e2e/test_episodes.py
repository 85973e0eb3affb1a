"""Whole runs of episodes in an environment: they learn, agree, repeat on other ranks, and survive a kill in between."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spmdrl.checkpoint.manifest import newest_step
from spmdrl.engine.torch.runner import ModelRunner, Sampled
from spmdrl.engine.torch.scheduler import RequestState
from spmdrl.faults.files import FaultFiles, read_json
from spmdrl.rollout.episode import Episode
from spmdrl.rollout.files import read_parts
from spmdrl.tools import replay
from spmdrl.train import main
from spmdrl.types import Request, Rollout
from tests.helpers import hints, oracle
from tests.helpers.agents import script
from tests.helpers.cuts import Step, cut
from tests.helpers.exports import evaluate_export
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    rows,
    sample_rows,
    steady_rows,
    without_curves,
    write_config,
    write_small_run,
)

ENVIRONMENT = f'environment.source={{kind="class",name="{hints.__file__}:Hints"}}'
SETTINGS = (ENVIRONMENT, "report.samples_per_step=100", "debug.save_rollouts=all")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("episodes")
    write_small_run(
        path,
        model={"num_layers": 2, "spare_tokens": 1},
        **hints.TABLES,
        checkpoint={"every": 1},
    )
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """Four steps on two ranks that nothing stopped."""
    launch(folder, 2, "run.name=whole", *SETTINGS)
    return folder / "runs/whole"


def rollouts_of(run: Path, step: int) -> dict[tuple[int, int], Rollout]:
    return {
        (rollout.prompt.prompt_id, rollout.sample_index): rollout
        for part in read_parts(run / "rollouts", step)
        for rollout, _ in part.outcomes
    }


def test_episodes_have_turns_and_agree_with_the_trainer(whole: Path) -> None:
    for step in range(1, 5):
        rollouts = rollouts_of(whole, step).values()
        assert {rollout.end for rollout in rollouts} <= {"done", "length", "context"}
        done = [rollout for rollout in rollouts if rollout.end == "done"]
        assert len(done) > len(rollouts) / 2 and all(len(rollout.turns) == 3 for rollout in done)
    # `debug.assert_on_policy` has compared every token of every turn on the way.
    assert all(0 < row["mismatch/max_abs_nats"] < 1e-5 for row in rows(whole)[1:])


@pytest.mark.slow
def test_one_rank_samples_the_episodes_of_two(folder: Path, whole: Path) -> None:
    launch(folder, 1, "run.name=alone", "run.num_steps=1", *SETTINGS)
    alone, pair = (rollouts_of(folder / "runs" / name, 1) for name in ("alone", "whole"))
    assert alone.keys() == pair.keys()
    for place, rollout in alone.items():
        other = pair[place]
        assert [trajectory.token_ids for trajectory in rollout.trajectories] == [
            trajectory.token_ids for trajectory in other.trajectories
        ]
        assert [turn.observation for turn in rollout.turns] == [turn.observation for turn in other.turns]
        assert rollout.end == other.end


ONE_TURN = """\
class Verified:
    def reset(self, prompt, seed):
        return None

    def step(self, action):
        return None, 0.0, True
"""


def test_episodes_of_one_turn_are_single_responses_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    """Test that an environment which ends each episode at its first answer changes nothing, under the same verifier."""
    (tmp_path / "one_turn.py").write_text(ONE_TURN)
    write_config(tmp_path, model={"path": f"{folder}/model"}, rollout={"stop_token_ids": [*range(80, 99)]})
    shared = ("run.num_steps=2", "report.samples_per_step=0", "debug.save_rollouts=all")
    one_turn = f'environment.source={{kind="class",name="{tmp_path}/one_turn.py:Verified"}}'
    for name, setting in (("single", ()), ("episodes", (one_turn, "environment.max_turns=1"))):
        launch(tmp_path, 1, f"run.name={name}", *shared, *setting)
    single, episodes = (tmp_path / "runs" / name for name in ("single", "episodes"))
    for step in (1, 2):
        expected, found = (rollouts_of(run, step) for run in (single, episodes))
        assert {rollout.end for rollout in found.values()} == {"done", "context"}
        assert {place: rollout.responses for place, rollout in found.items()} == {
            place: rollout.responses for place, rollout in expected.items()
        }
    assert_same_weights(single, episodes)
    for row, expected_row in zip(steady_rows(episodes), steady_rows(single), strict=True):
        assert {name: row.get(name) for name in expected_row} == expected_row


@pytest.mark.slow
def test_killed_in_the_middle_of_an_episode_a_run_is_bitwise_the_run_that_was_not(folder: Path, whole: Path) -> None:
    marker = folder / "marker"
    waiting = (
        *SETTINGS,
        f'environment.source={{kind="class",name="{hints.__file__}:Hints",params={{marker="{marker}"}}}}',
        "environment.sandbox.mode=off",
        "environment.step_timeout_s=100.0",
        'resume.changed=["environment"]',
    )
    launch(folder, 2, "run.name=killed", "run.num_steps=2", *SETTINGS)
    run = folder / "runs/killed"
    with ThreadPoolExecutor(1) as pool:
        arguments = [str(folder / "c.toml"), "run.name=killed", *waiting]
        job = pool.submit(run_ranks, 2, without_curves, main, arguments, timeout_s=200.0)
        began = time.monotonic()
        while not marker.exists():
            assert not job.done() and time.monotonic() - began < 120
            time.sleep(0.01)
        status = read_json(FaultFiles(run).status_of(1))
        assert status is not None
        os.kill(status["pid"], signal.SIGKILL)
        with pytest.raises(AssertionError, match="died without a word"):
            job.result()
    launch(folder, 2, "run.name=killed", *SETTINGS)
    assert_same_weights(run, whole)
    assert sample_rows(run) == sample_rows(whole)
    assert steady_rows(run) == steady_rows(whole)


COMPACTING: dict[str, Any] = {
    "model": {"num_layers": 1, "chat": True},
    "run": {"num_steps": 3},
    "data": {"max_prompt_tokens": 32},
    "rollout": {
        "max_response_tokens": 64,
        "stop_token_ids": [1, *range(60, 99)],
        "partial": True,
        "max_staleness": 2,
        "max_running": 12,
    },
    "correction": {"kind": "tis"},
    "environment": {
        "source": {"kind": "class", "name": f"{hints.__file__}:Hints"},
        "history": "template",
        "max_turns": 4,
        "max_turn_tokens": 4,
        "context": {"kind": "summary", "max_tokens": 12, "max_summary_tokens": 11, "request": "?", "heading": "!"},
    },
    "reward": {"terms": [{"kind": "environment"}]},
    "pack": {"prefix_tree": "auto"},
    "eval": None,
    "checkpoint": {"every": 1, "keep_last": 8},
    "report": {"samples_per_step": 100, "tensorboard": False},
}


def in_a_summary(step: int, rank: int) -> None:
    """Kill a rank while its engine samples a summary."""
    request, decode, cut_step, asked = Episode.request, ModelRunner.decode, Step(step, rank), list[Episode]()

    def request_and_note(episode: Episode) -> Request:
        asked.append(episode)
        return request(episode)

    def decode_or_die(runner: ModelRunner, running: Sequence[RequestState]) -> Sampled:
        sampled = decode(runner, running)
        if cut_step.is_now and any(episode.is_summarizing for episode in asked):
            cut_step.die()
        return sampled

    Episode.request, ModelRunner.decode = request_and_note, decode_or_die


@pytest.mark.slow
def test_killed_while_it_samples_a_summary_a_run_is_bitwise_the_run_that_was_not(tmp_path: Path) -> None:
    """Rollouts go on across training, so that checkpoints too have episodes in the middle of one."""
    config = write_small_run(tmp_path, **COMPACTING)
    launch(tmp_path, 2, "run.name=whole")
    whole, killed = (tmp_path / "runs" / name for name in ("whole", "killed"))
    assert any(row.get("episode/compactions", 0) > 0.5 for row in rows(whole))
    saved = [json.loads(path.read_text())["carried"] for path in whole.glob("checkpoints/*/collector.json")]
    episodes = [episode for groups in saved for group in groups for episode in group["episodes"]]
    assert any(episode["is_summarizing"] and episode["response"]["token_ids"] for episode in episodes)
    for step in (1, 2, 3):
        with pytest.raises(AssertionError, match="died without a word"):
            run_ranks(2, cut, [str(config), "run.name=killed"], partial(in_a_summary, step, rank=0))
        assert (newest_step(killed / "checkpoints") or 0) == step - 1
    launch(tmp_path, 2, "run.name=killed")
    assert_same_weights(killed, whole)
    assert sample_rows(killed) == sample_rows(whole)
    assert steady_rows(killed) == steady_rows(whole)


SUB_AGENTS = """
    plan = chat([user(episode["prompt"])], model="policy/lead")["content"]
    for number in (1, 2, 3):
        said = chat([user(f"{number} {plan}")], model=f"policy/solver/{number}")["content"]
        post("/reward", {"reward": sum(map(str.isdigit, said)) / (1 + len(said)), "role": f"solver/{number}"})
        post("/reward", {"reward": 0.1 * len(said), "role": "lead"})
"""


@pytest.mark.slow
def test_sub_agents_have_trajectories_and_rewards_of_their_own(tmp_path: Path) -> None:
    """The lead is compared with those of its group, and solvers with each other in their episode."""
    source = {"kind": "agent", "command": script(tmp_path, SUB_AGENTS)}
    tables: dict[str, Any] = COMPACTING | {
        "run": {"num_steps": 2},
        "rollout": {"max_response_tokens": 200, "stop_token_ids": [1, *range(60, 99)]},
        "advantage": {"estimator": "hierarchical_grpo"},
        "correction": None,
        "environment": {"source": source, "max_turns": 4, "max_turn_tokens": 48, "sandbox": {"mode": "off"}},
        "debug": {"save_rollouts": "all"},
    }
    write_small_run(tmp_path, **tables)
    launch(tmp_path, 2)
    steps = rows(tmp_path / "runs/run")
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        outcomes = [one for part in read_parts(tmp_path / "runs/run/rollouts", row["step"]) for one in part.outcomes]
        outcomes.sort(key=lambda one: (one[0].prompt.prompt_id, one[0].sample_index))
        assert len(outcomes) == 8 * 4 and row["episode/trajectories"] == 4 and row["update/grad_norm"] > 0
        sums = defaultdict[int, list[float]](lambda: [0.0, 0.0])
        for first in range(0, len(outcomes), 4):
            group = outcomes[first : first + 4]
            turns = [turns_of(rollout) for rollout, _ in group]
            rewards = [outcome.reward for _, outcome in group]
            found = oracle.by_role(rewards, turns, in_teams=True, divide_by_std=True)
            for (rollout, _), advantages in zip(group, found, strict=True):
                for number, (turn, advantage) in enumerate(zip(rollout.turns, advantages, strict=True)):
                    num_tokens = len(turn.response.token_ids)
                    sums[number] = [sums[number][0] + num_tokens * advantage, sums[number][1] + num_tokens]
        for number, (total, count) in sums.items():
            assert row[f"advantage/turn_{number}_mean"] == pytest.approx(total / count, abs=1e-5)


def turns_of(rollout: Rollout) -> list[tuple[str, float]]:
    """The role of each turn, of which none acts twice, and what it has earned."""
    assert rollout.initial_observation is not None
    read = [rollout.initial_observation, *(turn.observation for turn in rollout.turns if turn.observation is not None)]
    roles = [one.role for one in read if one.role is not None]
    assert roles == ["lead", "solver/1", "solver/2", "solver/3"]
    return [(role, sum(one.role_rewards.get(role, 0.0) for one in read)) for role in roles]


@pytest.mark.slow
def test_with_equal_bits_the_mismatch_of_every_turn_is_zero(folder: Path) -> None:
    launch(folder, 1, "run.name=exact", "run.num_steps=2", "true_on_policy=true", *SETTINGS)
    assert [row["mismatch/max_abs_nats"] for row in rows(folder / "runs/exact")[1:]] == [0.0, 0.0]


def test_a_run_is_replayed_and_its_export_evaluated(whole: Path) -> None:
    measured = next(row for row in reversed(rows(whole)) if "eval/reward" in row)
    found = evaluate_export(whole)
    assert "eval/turns" in found and found == {name: measured[name] for name in found}
    assert set(run_ranks(2, replay.main, [str(whole), "--step", "4"], timeout_s=100.0)) == {0}


@pytest.mark.slow
def test_episodes_go_on_in_the_next_step_and_in_the_run_that_goes_on_apart_from_the_trainer(folder: Path) -> None:
    """With greedy episodes to compare with, on a rank of their own; the run is stopped and goes on."""
    apart = (
        *SETTINGS,
        'rollout.placement="disaggregated"',
        "rollout.num_ranks=1",
        "rollout.partial=true",
        "rollout.oversample_fraction=0.5",
        "rollout.max_staleness=3",
        "correction.kind=tis",
        'advantage.estimator="remax"',
        "run.deterministic=false",
        "debug.assert_on_policy=false",
    )
    for num_steps in (2, 3):
        launch(folder, 2, "run.name=apart", f"run.num_steps={num_steps}", *apart)
    seen: set[tuple[int, int]] = set()
    for step in (1, 2, 3):
        rollouts = rollouts_of(folder / "runs/apart", step)
        assert len(rollouts) == 8 * (4 + 1) and not seen & rollouts.keys()
        seen |= rollouts.keys()
        assert {rollout.failure for rollout in rollouts.values()} == {None}
        assert sum(rollout.is_baseline for rollout in rollouts.values()) == 8
    assert sum(row.get("rollout/continued_count", 0) for row in rows(folder / "runs/apart")) > 0


CASES = {
    "no such file": ('environment.source={kind="class",name="{folder}/absent.py:A"}', "absent.py"),
    "no such class": (f'environment.source={{kind="class",name="{hints.__file__}:Hint"}}', "did you mean Hints?"),
    "a reset that fails": ('environment.source={kind="class",name="{folder}/bad.py:Fails"}', "no world today"),
    "an argument too many": (
        f'environment.source={{kind="class",name="{hints.__file__}:Hints",params={{bogus=1}}}}',
        "bogus",
    ),
    "limits that cannot hold": ("environment.max_turn_tokens=30", "do not fit into rollout.max_response_tokens = 40"),
    "roles without names": ("advantage.estimator=grpo_by_role", "let it return Observation(role=...)"),
    "a context of prompts that are no messages": (
        f'environment={{source={{kind="class",name="{hints.__file__}:Hints"}},history="template",'
        'context={kind="truncate"}}',
        "no chat template has rendered",
    ),
    "an unknown kind": ('environment.source={kind="clas"}', "environment.source.kind"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_environments_get_a_sentence_before_anything_starts(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.py").write_text(
        "class Fails:\n    def reset(self, prompt, seed):\n        raise ValueError('no world today')\n"
        "    def step(self, action):\n        return '', 0.0, True\n"
    )
    override, sentence = CASES[case]
    override = override.replace("{folder}", str(folder))
    assert main([str(folder / "c.toml"), "run.name=bad", ENVIRONMENT, override]) == 2
    said = capsys.readouterr().err
    assert sentence in said and "Traceback" not in said.replace("Traceback (most recent call last)", "", 1)
    assert not (folder / "runs/bad").exists()
