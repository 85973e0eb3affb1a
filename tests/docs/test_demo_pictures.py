"""The pictures of the demo: seeded, each in one question, none held out and trained on, and no answer likelier."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spmdrl.tools import demo_data
from spmdrl.tools.demo_data import CELL, KINDS, PAINTS, Question, pictures

NUM_QUESTIONS = 2400


@pytest.fixture(scope="module")
def drawn() -> list[Question]:
    return list(islice(pictures(random.Random(3)), NUM_QUESTIONS))


def pixels(image: str) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(image.removeprefix("data:image/png;base64,"))))


def cells_with(colour: str, picture: Image.Image) -> list[tuple[int, int]]:
    """The rows and columns of cells that have pixels of a colour."""
    found = {
        (y // CELL, x // CELL)
        for y in range(picture.height)
        for x in range(picture.width)
        if picture.getpixel((x, y)) == PAINTS[colour]
    }
    return sorted(found)


def test_a_seed_draws_the_same_pictures_again(drawn: list[Question]) -> None:
    assert list(islice(pictures(random.Random(3)), 40)) == drawn[:40]
    others = {question.image for question in islice(pictures(random.Random(4)), 40)}
    assert others.isdisjoint(question.image for question in drawn)


def test_no_picture_comes_twice(drawn: list[Question]) -> None:
    assert len({pixels(question.image).tobytes() for question in drawn[:400]}) == 400
    assert len({question.image for question in drawn}) == NUM_QUESTIONS


def test_kinds_come_equally_often_and_so_do_their_answers(drawn: list[Question]) -> None:
    kinds = Counter(question.prompt for question in drawn)
    assert kinds == {f"<image>{kind}?": NUM_QUESTIONS // len(KINDS) for kind in KINDS}
    # What one answers with the best constant, given the kind and the size of the picture.
    known = Counter((question.prompt, question.guesses, question.answer) for question in drawn)
    best = Counter[tuple[str, tuple[str, ...]]]()
    for (prompt, guesses, _), count in known.items():
        best[prompt, guesses] = max(best[prompt, guesses], count)
    assert sum(best.values()) / NUM_QUESTIONS < 0.32  # a quarter, and what chance adds to the best of each


def test_answers_are_true_of_the_pictures(drawn: list[Question]) -> None:
    for question in drawn[:200]:
        picture = pixels(question.image)
        found = {colour: cells for colour in PAINTS if (cells := cells_with(colour, picture))}
        (colour, cells), kind = *found.items(), question.prompt.removeprefix("<image>")
        rows, columns = picture.height // CELL, picture.width // CELL
        assert question.answer in question.guesses
        if kind == "how many?":
            assert question.answer == str(len(cells))
        elif kind == "which colour?":
            assert question.answer == colour
        elif kind == "where?":
            ((row, column),) = cells
            names = [name for name in question.answer.split()]
            assert names[0] == {0: "top", rows - 1: "bottom"}.get(row, "middle")
            assert names[1] == {0: "left", columns - 1: "right"}.get(column, "centre")


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_no_held_out_picture_is_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_data, "NUM_PICTURES", 300)
    monkeypatch.setitem(demo_data.NUM_PAIRS, "vision", 600)
    assert demo_data.main(["vision", str(tmp_path)]) == 0
    held_out, train, imitated = (rows_of(tmp_path / f"{name}.jsonl") for name in ("held-out", "train", "sft"))
    assert (len(held_out), len(train), len(imitated)) == (demo_data.HELD_OUT, 300, 600)
    hidden = {row["image"] for row in held_out}
    assert hidden.isdisjoint(row["image"] for row in train)
    assert {row["image"] for row in imitated} <= {row["image"] for row in train}
    right = {row["image"]: row["answer"] for row in train}
    share = sum(row["response"] == right[row["image"]] for row in imitated) / len(imitated)
    guessed = demo_data.GUESSED
    assert abs(share - (1 - guessed + guessed / 4)) < 0.08
