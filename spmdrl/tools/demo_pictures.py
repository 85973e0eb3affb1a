"""The pictures of `make demo TASK=vision`, and questions about them: how many, which colour, which shape, where.

A picture is a dark ground of four or six cells, some of which hold a thing; all things of a picture are alike. All
follows from the random numbers that the caller hands over.
"""

from __future__ import annotations

import base64
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, ImageDraw

CELL = 16  # pixels
GRIDS = ((2, 2), (2, 3), (3, 2))  # rows and columns of cells
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 210, 40)}
SHAPES = ("circle", "square", "triangle")
COUNTS = ("1", "2", "3", "4")
ROWS = {2: ("top", "bottom"), 3: ("top", "middle", "bottom")}
COLUMNS = {2: ("left", "right"), 3: ("left", "centre", "right")}
KINDS = ("how many", "which colour", "which shape", "where")
# Texts that are one token each for the model of the demo.
WORDS = (*KINDS, *COUNTS, *COLOURS, *SHAPES, *ROWS[3], *(f" {column}" for column in COLUMNS[3]))

Cell = tuple[int, int]  # row and column, from 0


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a picture, its answer, and what somebody could answer who sees no more than the size."""

    prompt: str
    image: str  # a PNG file, as base64
    answer: str
    guesses: tuple[str, ...]


def pictures(rng: random.Random) -> Iterator[Question]:
    """Yield questions without end, each about a picture of its own: the kinds in turn, and all answers alike."""
    seen: set[str] = set()
    for kind in itertools.cycle(KINDS):
        question = _question(kind, rng)
        if question.image not in seen:
            seen.add(question.image)
            yield question


def _question(kind: str, rng: random.Random) -> Question:
    rows, columns = rng.choice(GRIDS)
    places = {(r, c): f"{ROWS[rows][r]} {COLUMNS[columns][c]}" for r in range(rows) for c in range(columns)}
    count = 1 if kind == "where" else rng.randint(1, len(COUNTS))
    cells = rng.sample([*places], count)
    colour, shape = rng.choice([*COLOURS]), rng.choice(SHAPES)
    answer, guesses = {
        "how many": (str(count), COUNTS),
        "which colour": (colour, tuple(COLOURS)),
        "which shape": (shape, SHAPES),
        "where": (places[cells[0]], tuple(places.values())),
    }[kind]
    image = Image.new("RGB", (columns * CELL, rows * CELL), tuple(rng.randrange(40) for _ in range(3)))
    for cell in cells:
        _draw(ImageDraw.Draw(image), cell, shape, COLOURS[colour], rng)
    file = BytesIO()
    image.save(file, format="PNG")
    in_letters = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return Question(prompt=f"<image>{kind}?", image=in_letters, answer=answer, guesses=guesses)


def _draw(
    pencil: ImageDraw.ImageDraw, cell: Cell, shape: str, colour: tuple[int, int, int], rng: random.Random
) -> None:
    """Draw a thing of any size that a cell has room for, somewhere in it."""
    size = rng.randrange(CELL // 2 + 1, CELL - 1)
    top, left = (CELL * place + rng.randint(1, CELL - 1 - size) for place in cell)
    right, bottom = left + size - 1, top + size - 1
    if shape == "circle":
        pencil.ellipse((left, top, right, bottom), fill=colour)
    elif shape == "square":
        pencil.rectangle((left, top, right, bottom), fill=colour)
    else:
        pencil.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=colour)
