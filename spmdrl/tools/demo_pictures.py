"""The pictures of `make demo TASK=vision`, and questions about them: how many, which colour, where.

A picture is a grid of four or six cells, most of which hold a shape. Everything follows from the random numbers that
the caller hands over.
"""

from __future__ import annotations

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
ROWS, COLUMNS = (
    {2: ("top", "bottom"), 3: ("top", "middle", "bottom")},
    {2: ("left", "right"), 3: ("left", "centre", "right")},
)
COUNTS = tuple(str(count) for count in range(5))
IMAGE = "<image>"  # its place in a prompt
NOTHING, DESCRIBE = "nothing", f"{IMAGE}describe"
# Texts that are one token each for the model of the demo.
WORDS = (
    *("how many ", "colour of the", "where is the ", "describe", ", ", NOTHING, *COLOURS, *COUNTS),
    *(f" {shape}" for shape in SHAPES),
    *dict.fromkeys(f"{row} {column}" for r, c in GRIDS for row in ROWS[r] for column in COLUMNS[c]),
)

Cell = tuple[int, int]  # row and column, from 0
Thing = tuple[str, str]  # colour and shape


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question about a picture, its answer, and what somebody could answer who does not see the picture."""

    prompt: str
    image: bytes  # a PNG file
    answer: str
    guesses: tuple[str, ...]
    description: str  # of the picture: what is in each of its cells, row by row


def pictures(rng: random.Random) -> Iterator[Question]:
    """Yield questions without end, each about a picture of its own: the three kinds in turn, all answers alike."""
    seen: set[bytes] = set()
    for kind in itertools.cycle(("how many", "which colour", "where")):
        question = _question(kind, rng)
        if question.image not in seen:
            seen.add(question.image)
            yield question


def _question(kind: str, rng: random.Random) -> Question:
    """Choose the answer first, then a picture of which it is true."""
    rows, columns = rng.choice(GRIDS)
    cells = list(itertools.product(range(rows), range(columns)))
    colour, shape = rng.choice([*COLOURS]), rng.choice(SHAPES)
    if kind == "how many":
        count = rng.randrange(len(COUNTS))
        asked = {cell: (colour, rng.choice(SHAPES)) for cell in rng.sample(cells, count)}
        text, answer, guesses = f"how many {colour}?", str(count), COUNTS
    elif kind == "which colour":
        asked = {rng.choice(cells): (colour, shape)}
        text, answer, guesses = f"colour of the {shape}?", colour, tuple(COLOURS)
    else:
        cell = rng.choice(cells)
        asked = {cell: (colour, shape)}
        places = {(r, c): f"{ROWS[rows][r]} {COLUMNS[columns][c]}" for r, c in cells}
        text, answer, guesses = f"where is the {colour}?", places[cell], tuple(places.values())
    unasked = shape if kind == "which colour" else colour  # what nothing else in the picture may have
    others = [thing for thing in itertools.product(COLOURS, SHAPES) if unasked not in thing]
    things = asked | {cell: rng.choice(others) for cell in cells if cell not in asked and rng.random() < 0.6}
    described = (" ".join(things[cell]) if cell in things else NOTHING for cell in cells)
    return Question(
        image=_draw(rows, columns, things, rng),
        prompt=f"{IMAGE}{text}",
        answer=answer,
        guesses=guesses,
        description=", ".join(described),
    )


def _draw(rows: int, columns: int, things: dict[Cell, Thing], rng: random.Random) -> bytes:
    """Draw the things, each somewhere in its cell, and return a PNG file."""
    ground = tuple(rng.randrange(40) for _ in range(3))
    image = Image.new("RGB", (columns * CELL, rows * CELL), ground)
    pencil = ImageDraw.Draw(image)
    for (row, column), (colour, shape) in things.items():
        size = rng.randrange(CELL // 2 + 1, CELL - 1)
        left, top = column * CELL + rng.randint(1, CELL - 1 - size), row * CELL + rng.randint(1, CELL - 1 - size)
        right, bottom = left + size - 1, top + size - 1
        if shape == "circle":
            pencil.ellipse((left, top, right, bottom), fill=COLOURS[colour])
        elif shape == "square":
            pencil.rectangle((left, top, right, bottom), fill=COLOURS[colour])
        else:
            pencil.polygon(((left, bottom), (right, bottom), ((left + right) / 2, top)), fill=COLOURS[colour])
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
