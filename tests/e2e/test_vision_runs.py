"""Whole runs of a model that looks at images, sampled by the torch engine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoModelForImageTextToText

from spmdrl import sft
from spmdrl.data.image_store import ImageStore
from spmdrl.replay.recorder import difference
from spmdrl.tools.replay import replay
from spmdrl.train import main
from tests.helpers.exports import evaluate_export
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    rows,
    sample_rows,
    steady_rows,
    weights,
    without_curves,
    write_config,
    write_sft_config,
)
from tests.helpers.vision import save_vision_files, write_questions
from tests.helpers.vision_models import save_gemma4_vl, save_qwen3_5_moe_vl, save_qwen3_vl, save_qwen3_vl_moe

EXACT = 1e-5  # nats between engine and trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen3-VL, questions with 0 to 3 pictures, and the configuration of a small run."""
    path = tmp_path_factory.mktemp("vision")
    save_qwen3_vl(path / "model", eos_token_id=1, pad_token_id=0)
    save_vision_files(path / "model")
    write_config(
        path,
        data=write_questions(path, "train", first=0, count=30) | {"max_prompt_tokens": 64},
        eval=write_questions(path, "held-out", first=100, count=6) | {"num_prompts": 6, "every": 1},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 6},
        report={"samples_per_step": 100},
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "longest"),
    [(save_qwen3_5_moe_vl, 64), (save_gemma4_vl, 240)],  # of up to three images of 9 or 70 tokens
    ids=["qwen3_5_moe", "gemma4"],
)
def test_a_family_learns_from_pictures_by_rewards_and_from_answers(
    tmp_path: Path, save: Callable[..., str], longest: int
) -> None:
    save(tmp_path / "model", eos_token_id=1, pad_token_id=0)
    save_vision_files(tmp_path / "model")
    data = write_questions(tmp_path, "train", first=0, count=30) | {"max_prompt_tokens": longest}
    run = {"name": "run", "num_steps": 20, "deterministic": True, "threads_per_rank": 1}
    rollout = {"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 6}
    pack = {"max_tokens_per_micro_batch": 1024}
    write_config(tmp_path, run=run, data=data, eval=None, rollout=rollout, pack=pack)
    launch(tmp_path, 2)
    steps = rows(tmp_path / "runs/run")
    assert len(steps) == 20 and all(0 < row["mismatch/max_abs_nats"] < EXACT for row in steps)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.1
    AutoModelForImageTextToText.from_pretrained(tmp_path / "runs/run/hf")
    sizes = {"sequences_per_step": 8, "max_response_tokens": 6}
    (source,) = data["sources"]
    data |= {"sources": [source | {"answer_column": "", "response_column": "answer"}]}
    path = write_sft_config(tmp_path, name="sft.toml", run=run | {"name": "sft"}, data=data, sft=sizes, pack=pack)
    assert set(run_ranks(2, without_curves, sft.main, [str(path)], timeout_s=250.0)) == {0}
    found = [row["update/loss"] for row in rows(tmp_path / "runs/sft")]
    assert len(found) == 20 and found[-1] < 0.5 * found[0], found


@pytest.mark.slow
def test_a_teacher_with_a_tower_of_its_own_is_followed(folder: Path) -> None:
    save_qwen3_vl_moe(folder / "teacher", eos_token_id=1, pad_token_id=0)
    save_vision_files(folder / "teacher")
    taught = (f'models={{big={{path="{folder}/teacher"}}}}', 'distill={teacher="big",divergence="forward"}')
    settings = ("run.name=taught", *taught, "advantage.estimator=none", "run.num_steps=12", "eval.every=0")
    launch(folder, 2, *settings, "debug.save_rollouts=all")
    found = [row["distill/forward_nats"] for row in rows(folder / "runs/taught") if "update/loss" in row]
    assert len(found) == 12 and found[-1] < 0.9 * found[0], found
    replayed, *_ = run_ranks(2, replay, folder / "runs/taught", 11)
    assert replayed.before is not None and difference(replayed.before, replayed.now).is_none


@pytest.fixture(scope="module")
def straight(folder: Path) -> Path:
    """Four steps on two ranks that nothing stopped."""
    launch(folder, 2, "run.name=straight")
    return folder / "runs/straight"


def test_engine_and_trainer_agree_in_every_step_and_the_policy_learns(straight: Path) -> None:
    steps = rows(straight)[1:]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(0 < row["mismatch/max_abs_nats"] < EXACT for row in steps)
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]
    assert "eval/accuracy" in steps[-1]
    AutoModelForImageTextToText.from_pretrained(straight / "hf")


def test_the_tower_stays_as_it_was(folder: Path, straight: Path) -> None:
    before = AutoModelForImageTextToText.from_pretrained(folder / "model").state_dict()
    after = weights(straight)
    is_equal = {name: bool((before[name] == tensor).all()) for name, tensor in after.items() if name in before}
    assert all(equal == ("visual" in name) for name, equal in is_equal.items())


@pytest.mark.slow
def test_a_tower_that_is_trained_moves_and_the_engine_sees_by_it(folder: Path) -> None:
    launch(folder, 2, "run.name=trained", "run.num_steps=2", "model.freeze=[]", 'optim.rates={"visual.*"=1e-4}')
    before = AutoModelForImageTextToText.from_pretrained(folder / "model").state_dict()
    run = folder / "runs/trained"
    after = weights(run)
    tower = [name for name in after if "visual" in name]
    assert tower and not any(bool((before[name] == after[name]).all()) for name in tower)
    assert all(0 < row["mismatch/max_abs_nats"] < EXACT for row in rows(run)[1:])
    assert all(row["images/tower_passes"] == 0 < row["images/patches"] for row in rows(run)[1:])
    assert all(row["update/lr/visual.*"] == 1e-4 != row["update/lr"] for row in rows(run)[1:])


def test_a_rate_for_what_is_not_trained_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder / "c.toml"), 'optim.rates={"visual.*"=1e-4}', "--dry-run"]) == 2
    assert 'optim.rates has a rate for "visual.*", but the tower is not trained' in capsys.readouterr().err


SHARERS = {"adapters": ("lora.rank=4",), "critic": ("advantage.estimator=gae", "rollout.group_size=1")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARERS)
def test_adapters_and_a_critic_share_the_look_of_a_frozen_tower(folder: Path, name: str) -> None:
    launch(folder, 2, f"run.name={name}", "run.num_steps=2", *SHARERS[name])
    steps = rows(folder / "runs" / name)[1:]
    assert len(steps) == 2
    assert all(0 < row["mismatch/max_abs_nats"] < EXACT for row in steps)
    assert all(row["images/tower_passes"] > 0 for row in steps)


@pytest.mark.slow
def test_four_steps_are_two_and_a_new_process_and_two(folder: Path, straight: Path) -> None:
    launch(folder, 2, "run.name=halves", "run.num_steps=2")
    launch(folder, 2, "run.name=halves")
    halves = folder / "runs/halves"
    assert_same_weights(halves, straight)
    assert sample_rows(halves) == sample_rows(straight)
    assert steady_rows(halves) == steady_rows(straight)


@pytest.mark.slow
def test_apart_is_the_colocated_run_bit_for_bit(folder: Path) -> None:
    """The ranks that train look at images that only others have sampled from."""
    launch(folder, 1, "run.name=alone", "run.num_steps=2")
    apart = ('rollout.placement="disaggregated"', "rollout.num_ranks=1", "rollout.max_staleness=0")
    launch(folder, 2, "run.name=apart", "run.num_steps=2", *apart)
    one, other = folder / "runs/alone", folder / "runs/apart"
    assert sample_rows(one) == sample_rows(other)
    assert_same_weights(one, other)
    # Beside rollouts, where the store has room for the images of neither.
    launch(
        folder, 2, "run.name=beside", "run.num_steps=2", *apart, "run.deterministic=false", "data.image_store_gib=9e-5"
    )
    for run in (other, folder / "runs/beside"):
        assert [row["eval/reward"] for row in rows(run)] == [row["eval/reward"] for row in rows(one)]


@pytest.mark.slow
def test_images_that_found_no_room_are_read_again(folder: Path, straight: Path) -> None:
    kept, settings = folder / "kept", ["run.name=cramped", "data.image_store_gib=9e-5"]
    assert set(run_ranks(2, noting_images, kept, [str(folder / "c.toml"), *settings])) == {0}
    # Two ranks may keep an image at the same moment.
    assert max(Counter(kept.read_text().split()).values()) > 2, "no image was removed and kept again"
    cramped = folder / "runs/cramped"
    assert sample_rows(cramped) == sample_rows(straight)
    assert_same_weights(cramped, straight)


def noting_images(notes: Path, argv: list[str]) -> int:
    """Run one rank, and note the digest of each image when it is written into the store."""
    write = ImageStore._write

    def noted(self: ImageStore, file: Path, *content: Any) -> None:
        with notes.open("a") as lines:
            lines.write(f"{file.name}\n")
        write(self, file, *content)

    with mock.patch.object(ImageStore, "_write", noted):
        return without_curves(main, argv)


def test_an_export_is_evaluated(straight: Path) -> None:
    """Beside a run whose images are no longer anywhere."""
    found, last = evaluate_export(straight), rows(straight)[-1]
    assert {name: found[name] for name in ("eval/reward", "eval/response_tokens")} == pytest.approx(
        {name: last[name] for name in ("eval/reward", "eval/response_tokens")}
    )


@pytest.mark.slow
def test_unfinished_groups_go_on(folder: Path) -> None:
    """Groups with images that a step interrupts, also when it is a second process that goes on with them."""
    settings = (
        "run.name=partial",
        "run.deterministic=false",
        "rollout.partial=true",
        "rollout.oversample_fraction=0.5",
        "rollout.max_response_tokens=48",  # so long that some are always unfinished when the step has enough
        "rollout.max_running=6",
        "checkpoint.every=1",
        "checkpoint.keep_last=4",
        "eval.every=4",
    )
    launch(folder, 2, *settings, "run.num_steps=2")
    launch(folder, 2, *settings, "run.num_steps=3")
    run = folder / "runs/partial"
    assert sum(row["rollout/continued_count"] for row in rows(run)[1:]) > 0
    saved = json.loads(next(run.glob("checkpoints/*2/collector.json")).read_text())
    assert any(group["prompt_images"] for group in saved["carried"]), "no interrupted group has an image"
    fresh = [row for row in rows(run)[1:] if not row["rollout/max_staleness_steps"]]
    assert all(row["mismatch/max_abs_nats"] < EXACT for row in fresh)
