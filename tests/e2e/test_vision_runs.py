"""Whole runs of a model that looks at images, sampled by the torch engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    rows,
    sample_rows,
    steady_rows,
    weights,
    write_config,
)
from tests.helpers.vision import photo, save_vision_files
from tests.helpers.vision_models import save_qwen3_vl

EXACT = 1e-5  # nats between engine and trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Qwen3-VL, questions with 0 to 3 pictures, and the configuration of a small run."""
    path = tmp_path_factory.mktemp("vision")
    save_qwen3_vl(path / "model", eos_token_id=1, pad_token_id=0)
    save_vision_files(path / "model")
    write_config(
        path,
        data=sources(path, "train", first=0, count=30) | {"max_prompt_tokens": 64},
        eval=sources(path, "held-out", first=100, count=6) | {"num_prompts": 6, "every": 2},
        rollout={"prompts_per_step": 4, "group_size": 4, "max_response_tokens": 6},
        report={"samples_per_step": 100},
    )
    return path


def sources(folder: Path, name: str, *, first: int, count: int) -> dict[str, Any]:
    """Write questions about random pictures of many sizes; return the table that reads them."""
    lines = []
    for number in range(first, first + count):
        rng = random.Random(number)
        images = []
        for place in range(number % 4):
            images.append(f"{name}-{number}-{place}.png")
            photo(rng.randint(8, 30), rng.randint(8, 30), seed=10 * number + place).save(folder / images[-1])
        lines.append({"prompt": "<image>and" * len(images) + f" {number}", "answer": "7", "images": images})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"sources": [{"kind": "jsonl", "path": f"{folder}/{name}.jsonl", "image_column": "images"}]}


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


def test_four_steps_are_two_and_a_new_process_and_two(folder: Path, straight: Path) -> None:
    launch(folder, 2, "run.name=halves", "run.num_steps=2")
    launch(folder, 2, "run.name=halves")
    halves = folder / "runs/halves"
    assert_same_weights(halves, straight)
    assert sample_rows(halves) == sample_rows(straight)
    assert steady_rows(halves) == steady_rows(straight)


def test_apart_is_the_colocated_run_bit_for_bit(folder: Path) -> None:
    """The ranks that train look at images that only others have sampled from."""
    launch(folder, 1, "run.name=alone", "run.num_steps=2")
    apart = ('rollout.placement="disaggregated"', "rollout.num_ranks=1", "rollout.max_staleness=0")
    launch(folder, 2, "run.name=apart", "run.num_steps=2", *apart)
    one, other = folder / "runs/alone", folder / "runs/apart"
    assert sample_rows(one) == sample_rows(other)
    assert_same_weights(one, other)
    assert rows(other)[-1]["eval/reward"] == rows(one)[-1]["eval/reward"]


def test_images_that_found_no_room_are_read_again(folder: Path, straight: Path) -> None:
    launch(folder, 2, "run.name=cramped", "data.image_store_gib=1e-6")
    cramped = folder / "runs/cramped"
    assert sample_rows(cramped) == sample_rows(straight)
    assert_same_weights(cramped, straight)


def test_unfinished_groups_go_on(folder: Path) -> None:
    """Groups with images that are aborted at the end of a step, and that a second process goes on with."""
    settings = (
        "rollout.partial=true",
        "rollout.extra_groups=2",
        "run.deterministic=false",
        "debug.assert_on_policy=false",
    )
    launch(folder, 2, "run.name=partial", "run.num_steps=2", *settings)
    launch(folder, 2, "run.name=partial", *settings)
    run = folder / "runs/partial"
    assert any(row["rollout/continued_count"] for row in rows(run)[1:])
    assert all(row["mismatch/max_abs_nats"] < 1 for row in rows(run)[1:])
