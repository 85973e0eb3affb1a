"""A run on prompts with images: a step is computed again from files, whose images are read from the data again."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from spmdrl import sft, train
from spmdrl.rollout.files import read_parts, recorded_steps
from spmdrl.tools import replay, runs
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import rows, without_curves, write_config, write_sft_config
from tests.helpers.vision import TOKENS, photo, save_vision_files
from tests.helpers.vision_models import IMAGE, save_qwen2_5_vl

STORE_GIB = 56e3 / 2**30  # four of six images fit: those of a step, or those of an evaluation
SHOWN = [["0.png"], ["1.png"], ["2.png", "0.png"], []]  # by row


def write_data(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model, images, and sources that show the first three of them, and the others and one of those: the second is
    held out."""
    save_qwen2_5_vl(folder / "model")
    save_vision_files(folder / "model")
    for number in range(6):
        photo(16 + 8 * (number % 3), 24, seed=number).save(folder / f"{number}.png")
    sources = []
    for name, shown in (("train", [*SHOWN * 3, ["1.png"]]), ("held", [["3.png"], ["4.png", "5.png"], ["1.png"]])):
        rows = [{"prompt": f"{'<image>' * len(names)} {i % 12}?", "images": names} for i, names in enumerate(shown)]
        rows[-1]["prompt"] = "<image> both?"
        written = "".join(json.dumps(row | {"answer": "7", "reply": "a 7"}) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(written)
        sources.append(source_of(folder, name))
    return sources[0], sources[1]


def source_of(folder: Path, name: str) -> dict[str, Any]:
    return {"kind": "jsonl", "path": str(folder / f"{name}.jsonl"), "image_column": "images"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps on 2 ranks, which records them; its store has room for few images."""
    path = tmp_path_factory.mktemp("images")
    training, held_out = write_data(path)
    write_config(
        path,
        run={"dir": str(path), "num_steps": 2},
        data={"sources": [training], "max_prompt_tokens": 48, "image_store_gib": STORE_GIB},
        rollout={"prompts_per_step": 4, "group_size": 2, "max_response_tokens": 4},
        reward={"terms": [{"kind": "function", "function": f"{path}/reward.py:digits"}]},
        loss={"updates_per_step": None},
        eval={"sources": [held_out], "num_prompts": 3, "every": 1},
        checkpoint={"every": 1},
        report={"tensorboard": False},
        debug={"save_rollouts": "all"},
    )
    assert run_ranks(2, without_curves, train.main, [str(path / "c.toml")]) == [0, 0]
    return path


def told(program: Callable[[list[str]], int], *arguments: str) -> tuple[int, str]:
    """The exit code and the words of a program on one rank."""
    words = StringIO()
    with redirect_stdout(words), redirect_stderr(words):
        code = program(list(arguments))
    return code, words.getvalue()


@pytest.mark.slow
def test_a_step_is_computed_again_to_the_last_bit(folder: Path) -> None:
    assert recorded_steps(folder / "run/rollouts") == [1, 2]
    (code, words), _ = run_ranks(2, told, replay.main, str(folder / "run"), "--step", "2")
    assert code == 0 and "step 2: no difference" in words


def test_recordings_have_the_images_of_prompts_and_of_turns(folder: Path) -> None:
    rollouts = [rollout for part in read_parts(folder / "run/rollouts", 1) for rollout, _ in part.outcomes]
    assert sum(len(rollout.prompt.images) for rollout in rollouts) > 0
    for rollout in rollouts:
        (trajectory,) = rollout.trajectories
        assert trajectory.images == rollout.prompt.images
        placeholders = [image.num_tokens for image in trajectory.images]
        assert rollout.prompt.token_ids.count(IMAGE) == sum(placeholders)
        assert rollout.prompt.question.count("<image>") == len(placeholders)


@pytest.mark.slow
def test_recorded_rollouts_train_what_the_run_trained(folder: Path) -> None:
    text = (folder / "c.toml").read_text()
    without_eval = text[: text.index("[eval]")] + text[text.index("[checkpoint]") :]
    (folder / "read.toml").write_text(without_eval)
    overrides = [f'debug={{ load_rollouts = "{folder}/run/rollouts" }}', "run.name=read"]
    assert run_ranks(2, without_curves, train.main, [str(folder / "read.toml"), *overrides]) == [0, 0]
    names = ("update/loss", "update/grad_norm")
    before, after = ([[row.get(name) for name in names] for row in rows(folder / run)[-2:]] for run in ("run", "read"))
    assert before == after and None not in before[0]


def test_a_page_of_episodes_names_each_image(folder: Path) -> None:
    code, words = told(runs.episodes, str(folder / "run"), "--step", "1")
    assert code == 0, words
    (page,) = (folder / "run").rglob("*.html")
    rollouts = [rollout for part in read_parts(folder / "run/rollouts", 1) for rollout, _ in part.outcomes]
    names = {image.name for rollout in rollouts for image in rollout.prompt.images}
    text = page.read_text()
    assert names and all(text.count(name.strip("<>")) == 1 for name in names), "among the strings of the page's tokens"
    assert TOKENS[IMAGE].strip("<>") not in text
    samples = [json.loads(line) for line in (folder / "run/samples.jsonl").read_text().splitlines()]
    assert any("<image>" in sample["prompt"] for sample in samples)
    assert not any(TOKENS[IMAGE] in sample["prompt"] for sample in samples)


def test_images_that_have_changed_are_not_replayed(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.glob("*.png")}
    try:
        for path in before:
            photo(24, 24, seed=77).save(path)
        ends = run_ranks(2, told, replay.main, str(folder / "run"), "--step", "1")
        assert [code for code, _ in ends] == [2, 2]
        assert "are not those that it had before: the data has changed" in ends[0][1]
    finally:
        for path, content in before.items():
            path.write_bytes(content)


def test_pairs_with_images_are_imitated_and_held_out(tmp_path: Path) -> None:
    training, held_out = (source | {"response_column": "reply"} for source in write_data(tmp_path))
    write_sft_config(
        tmp_path,
        run={"dir": str(tmp_path), "num_steps": 2},
        data={"sources": [training], "max_prompt_tokens": 48, "image_store_gib": STORE_GIB},
        sft={"sequences_per_step": 4, "max_response_tokens": 8},
        held_out={"sources": [held_out], "num_prompts": 3, "every": 1},
        checkpoint={"every": 2},
        report={"tensorboard": False},
        reward=None,
    )
    assert run_ranks(2, without_curves, sft.main, [str(tmp_path / "c.toml")]) == [0, 0]
    assert [row["step"] for row in rows(tmp_path / "run") if "eval/loss" in row] == [0, 1, 2]


def test_images_behind_imitated_answers_are_read_alike_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Also by the held-out loss, whose images the training of each step pushes out of the store."""
    write_data(tmp_path)
    turn = {"role": "user", "content": "<image>?"}
    rows_of = {"train": [[0, 1], [2], [1, 0, 2], [0]], "held": [[3, 4, 5], [4]]}
    sources = {}
    for name, shown in rows_of.items():
        lines = [
            {
                "prompt": [m for n in numbers for m in (turn, {"role": "assistant", "content": f"a {n}"})],
                "images": [f"{n}.png" for n in numbers],
            }
            for numbers in shown
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        sources[name] = {
            "kind": "jsonl",
            "path": f"{tmp_path}/{name}.jsonl",
            "image_column": "images",
            "answer_column": "",
        }
    write_sft_config(
        tmp_path,
        run={"dir": str(tmp_path), "num_steps": 2},
        data={"sources": [sources["train"]], "max_prompt_tokens": 24, "image_store_gib": STORE_GIB},
        sft={"sequences_per_step": 4, "max_response_tokens": 60, "turns": "all"},
        held_out={"sources": [sources["held"]], "num_prompts": 2, "every": 1},
        checkpoint={"every": 2},
        report={"tensorboard": False},
        reward=None,
    )
    found = []
    for num_ranks in (1, 2):
        arguments = [str(tmp_path / "c.toml"), f"run.name=on{num_ranks}"]
        assert run_ranks(num_ranks, without_curves, sft.main, arguments) == [0] * num_ranks
        found.append(
            [
                [row.get(key) for key in ("step", "update/loss", "eval/loss")]
                for row in rows(tmp_path / f"on{num_ranks}")
            ]
        )
    one, two = found
    assert len(one) == len(two) == 3
    for first, second in zip(one, two, strict=True):
        assert first == pytest.approx(second, abs=1e-5, nan_ok=True) and first[2] is not None


def test_what_cannot_be_is_said_before_the_start(folder: Path) -> None:
    code, words = told(train.main, str(folder / "c.toml"), "--dry-run")
    assert code == 0 and "<image>" in words and TOKENS[IMAGE] not in words
    code, words = told(train.main, str(folder / "c.toml"), "--dry-run", "data.min_pixels=900")
    assert code == 2 and "held.jsonl line 1: images would have at least 900" in words


def test_a_dry_run_decodes_the_images_of_the_first_step(folder: Path) -> None:
    """One that is damaged behind its head ends any other run when a step decodes it."""
    write_sft_config(
        folder,
        name="sft.toml",
        data={"sources": [source_of(folder, "train") | {"response_column": "reply"}], "max_prompt_tokens": 48},
        sft={"sequences_per_step": 12, "max_response_tokens": 8},
        reward=None,
    )
    whole = (folder / "2.png").read_bytes()
    for program, config in ((train.main, "c.toml"), (sft.main, "sft.toml")):
        arguments = (str(folder / config), "--dry-run", "run.name=dry")
        if program is train.main:
            arguments += ("rollout.prompts_per_step=12",)  # all rows
        code, words = told(program, *arguments)
        assert code == 0 and "- images of the first step, all decoded: 3" in words
        try:
            (folder / "2.png").write_bytes(whole[:-40])
            code, words = told(program, *arguments)
        finally:
            (folder / "2.png").write_bytes(whole)
        assert code == 2 and "cannot start: train.jsonl line " in words and "2.png is damaged: " in words
