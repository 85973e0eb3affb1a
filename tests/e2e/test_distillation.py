"""Whole runs that learn from a teacher: it is followed, and stopping changes nothing."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from spmdrl import sft
from spmdrl.tools import replay
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers import hints
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    rows,
    steady_rows,
    without_curves,
    write_config,
    write_sft_config,
)


@pytest.fixture(scope="module")
def distilled(folder: Path) -> Path:
    """A run of 4 steps on 2 ranks without rewards, from a teacher with another number of layers, over the whole
    vocabulary."""
    save_tiny_model(folder / "teacher", num_layers=3, spare_tokens=1, seed=5)
    write_config(
        folder,
        models={"big": {"path": f"{folder}/teacher"}},
        distill={"teacher": "big", "divergence": "forward"},
        advantage={"estimator": "none"},
        reward={"terms": []},
        loss={"kl_coef": 0.0},
        optim={"lr": 1e-3},
        eval=None,
    )
    launch(folder, 2, "run.name=distilled")
    return folder / "runs/distilled"


def test_the_policy_comes_closer_to_its_teacher(distilled: Path) -> None:
    found = [row["distill/forward_nats"] for row in rows(distilled)]
    assert found[-1] < 0.8 * found[0] and found == sorted(found, reverse=True), found
    assert not any(name.startswith("reward/") for row in rows(distilled) for name in row), "there are no rewards"


@pytest.mark.slow
def test_a_run_that_stopped_is_bitwise_the_run_that_did_not(folder: Path, distilled: Path) -> None:
    launch(folder, 2, "run.name=stopped", "run.num_steps=2", "export.at_end=false")
    launch(folder, 2, "run.name=stopped")
    assert steady_rows(folder / "runs/stopped") == steady_rows(distilled)
    assert_same_weights(folder / "runs/stopped", distilled)


def test_recorded_responses_are_taught_without_their_cross_entropy(folder: Path, distilled: Path) -> None:
    answers = [{"prompt": f"{a} + {b} =", "response": f" {a + b}"} for a in range(8) for b in range(8)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    path = write_sft_config(
        folder,
        name="sft.toml",
        data={
            "sources": [
                {"kind": "jsonl", "path": f"{folder}/sft.jsonl", "answer_column": "", "response_column": "response"}
            ]
        },
        sft={"sequences_per_step": 16, "max_response_tokens": 6, "loss_coef": 0.0},
        models={"big": {"path": f"{folder}/teacher"}},
        distill={"teacher": "big", "divergence": "jsd"},
        optim={"lr": 1e-3},
    )
    assert set(run_ranks(2, without_curves, sft.main, [str(path), "run.name=sft"])) == {0}
    found = [row["distill/jsd_nats"] for row in rows(folder / "runs/sft")]
    assert len(found) == 4 and found[-1] < 0.8 * found[0], found


def test_sampled_tokens_are_compared_beside_rewards(folder: Path, distilled: Path) -> None:
    overrides = ["reward.terms=[{kind='exact'}]", "advantage.estimator=grpo", "distill.divergence=sampled_kl"]
    launch(folder, 1, "run.name=sampled", "run.num_steps=1", *overrides)
    (row,) = rows(folder / "runs/sampled")
    assert row["distill/sampled_kl_nats"] > 0 and row["update/grad_norm"] > 0


def test_the_policy_learns_from_itself_with_the_answer_before_it(folder: Path, distilled: Path) -> None:
    teacher = ['models={self={weights="policy"}}', 'distill={teacher="self",hint_column="answer",max_hint_tokens=8}']
    launch(folder, 2, "run.name=hinted", "run.num_steps=2", *teacher)
    assert all(row["distill/reverse_nats"] > 0 for row in rows(folder / "runs/hinted"))


@pytest.mark.slow
def test_the_policy_learns_from_what_its_environment_said(folder: Path, distilled: Path) -> None:
    overrides = [
        'models={self={weights="policy"}}',
        'distill={teacher="self",hint_column="feedback",max_hint_tokens=8,hint_template="{hint}{question}"}',
        f'environment={{max_turns=4,source={{kind="class",name="{hints.__file__}:Hints"}}}}',
        f"rollout.stop_token_ids={hints.TABLES['rollout']['stop_token_ids']}",
        "rollout.max_response_tokens=40",
        'reward.terms=[{kind="environment"}]',
    ]
    launch(folder, 2, "run.name=feedback", "run.num_steps=2", *overrides)
    for row in rows(folder / "runs/feedback"):
        assert row["distill/taught_fraction"] == 1.0 - row["rollout/truncated_fraction"] > 0.0
        assert row["distill/reverse_nats"] > 0.0 and row["update/grad_norm"] > 0.0


@pytest.mark.slow
def test_copies_that_follow_the_policy_are_saved_with_it(folder: Path, distilled: Path) -> None:
    overrides = [
        'models={self={weights="average",decay=0.5},reference={weights="lagged",every_steps=2}}',
        'distill={teacher="self",hint_column="answer",max_hint_tokens=8}',
        "loss={kl_coef=0.01,updates_per_step=1}",
        "checkpoint.every=1",
    ]
    launch(folder, 2, "run.name=following", "run.num_steps=3", *overrides)
    first, second, third = rows(folder / "runs/following")
    assert first["update/k3_ref_nats"] == 0.0 < second["update/k3_ref_nats"] and third["update/k3_ref_nats"] == 0.0
    launch(folder, 2, "run.name=follows", "run.num_steps=1", "export.at_end=false", *overrides)
    launch(folder, 2, "run.name=follows", "run.num_steps=3", *overrides)
    assert steady_rows(folder / "runs/follows") == steady_rows(folder / "runs/following")
    assert_same_weights(folder / "runs/follows", folder / "runs/following")


@pytest.fixture(scope="module")
def mixed(folder: Path) -> Path:
    """The listing of the page as a run of 2 steps, whose rollouts are kept."""
    save_tiny_model(folder / "teacher", num_layers=3, spare_tokens=1, seed=5)
    page = (Path(__file__).parents[2] / "docs" / "distillation.md").read_text(encoding="utf-8")
    (listing,) = re.findall(r"^```toml\n([^`]*?task = \"mathematics\".*?)^```", page, re.DOTALL | re.MULTILINE)
    tables = tomllib.loads(listing)
    for source in tables["data"]["sources"]:
        letter, source["path"] = source["task"][0], f"{folder}/{source['path']}"
        asked = [{"prompt": f"{letter} {a} + {b} =", "answer": f"{a + b}"} for a in range(8) for b in range(8)]
        Path(source["path"]).write_text("".join(json.dumps(row) + "\n" for row in asked))
    tables["models"]["writer"]["path"] = f"{folder}/teacher"
    run = {"num_steps": 2, "deterministic": True}
    write_config(folder, eval=None, optim={"lr": 1e-3}, run=run, checkpoint={"every": 1}, **tables)
    launch(folder, 2, "run.name=mixed", "debug.save_rollouts=1")
    return folder / "runs/mixed"


@pytest.mark.slow
def test_mathematics_is_rewarded_and_style_distilled(mixed: Path) -> None:
    first, second = rows(mixed)
    assert all(row["advantage/size_others"] > 0.0 == row["advantage/size_style"] for row in (first, second))
    assert second["distill/reverse_nats"] < first["distill/reverse_nats"]
    assert {"loss/mean_others", "loss/mean_style", "reward/mean_style", "reward/mean_mathematics"} <= first.keys()
    assert set(run_ranks(2, replay.main, [str(mixed), "--step", "2"], timeout_s=100.0)) == {0}


@pytest.mark.slow
def test_a_run_of_several_algorithms_goes_on_bitwise(folder: Path, mixed: Path) -> None:
    for steps in (1, 2):
        launch(folder, 2, "run.name=goes_on", "debug.save_rollouts=1", f"run.num_steps={steps}")
    assert steady_rows(folder / "runs/goes_on") == steady_rows(mixed)
    assert_same_weights(folder / "runs/goes_on", mixed)
