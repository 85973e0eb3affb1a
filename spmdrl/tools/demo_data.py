"""Write the data of a demo: `python -m spmdrl.tools.demo_data tool|game|vision|notes|pairs DIR`.

train.jsonl and held-out.jsonl hold questions, none of them in both. sft.jsonl holds what the warm start imitates: a
policy that knows the forms of what it may write, and not what leads to success. Pictures stand in the lines, as base64.
For pairs there is pairs.jsonl alone: a right and a wrong answer to each question of the plain demo.
"""

from __future__ import annotations

import base64
import itertools
import json
import random
import runpy
import string
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from spmdrl.config import ReasoningGymData
from spmdrl.faults.text import Parser

# The pictures of `make demo TASK=vision`, and questions about them: how many, which colour, which shape, where.
#
# A picture is a dark ground of four or six cells, some of which hold a thing; all things of a picture are alike. All
# follows from the random numbers that the caller hands over.


CELL = 16  # pixels
GRIDS = ((2, 2), (2, 3), (3, 2))  # rows and columns of cells
PAINTS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 210, 40)}
SHAPES = ("circle", "square", "triangle")
COUNTS = ("1", "2", "3", "4")
ROWS = {2: ("top", "bottom"), 3: ("top", "middle", "bottom")}
COLUMNS = {2: ("left", "right"), 3: ("left", "centre", "right")}
KINDS = ("how many", "which colour", "which shape", "where")
# Texts that are one token each for the model of the demo.
PICTURE_WORDS = (*KINDS, *COUNTS, *PAINTS, *SHAPES, *ROWS[3], *(f" {column}" for column in COLUMNS[3]))

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
    colour, shape = rng.choice([*PAINTS]), rng.choice(SHAPES)
    answer, guesses = {
        "how many": (str(count), COUNTS),
        "which colour": (colour, tuple(PAINTS)),
        "which shape": (shape, SHAPES),
        "where": (places[cells[0]], tuple(places.values())),
    }[kind]
    image = Image.new("RGB", (columns * CELL, rows * CELL), tuple(rng.randrange(40) for _ in range(3)))
    for cell in cells:
        _draw(ImageDraw.Draw(image), cell, shape, PAINTS[colour], rng)
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


# Questions, and what the warm start imitates.


CONFIGS = Path(__file__).parent / "configs"  # those of the repository
NUM_PAIRS = {"tool": 20_000, "game": 20_000, "vision": 8_000, "notes": 20_000, "pairs": 20_000}
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"  # what a policy may find to write
MOST_LETTERS = 11  # of a wrong answer: those of configs/demo.toml have at most 12
HELD_OUT = 400
HIGHEST, MAX_GUESSES = 10, 4  # of configs/demo-game.toml
NUM_PICTURES = 4_000  # besides those held out
GUESSED = 0.6  # of the answers about pictures that the warm start imitates

DemoRecord = dict[str, Any]

_TOOL = runpy.run_path(str(CONFIGS / "demo_tool.py"))
COLOURS, lookup = _TOOL["COLOURS"], _TOOL["lookup"]


def tool_questions(rng: random.Random) -> list[DemoRecord]:
    """Every key once, in a random order."""
    keys = [f"{a}{b}{digit}" for a in string.ascii_lowercase for b in string.ascii_lowercase for digit in range(10)]
    rng.shuffle(keys)
    return [{"prompt": f"colour of {key}?", "answer": lookup(key)} for key in keys]


def tool_pairs(questions: list[DemoRecord], rng: random.Random) -> Iterator[DemoRecord]:
    """Calls, many of them malformed; guesses without a call; and answers that follow a call's result."""
    while True:
        question = rng.choice(questions)["prompt"]
        key = question.removeprefix("colour of ").removesuffix("?")
        colour = rng.choice(COLOURS)
        # As the chat template shows the tool that the environment has.
        asked = [{"role": "system", "content": "lookup(key)"}, {"role": "user", "content": question}]
        call = f'<tool_call>{{"name": "lookup", "arguments": {{"key": "{key}"}}}}</tool_call>'
        answered = [*asked, {"role": "assistant", "content": call}, {"role": "tool", "content": lookup(key)}]
        form = rng.random()
        if form < 0.4:
            yield {"prompt": asked, "response": colour}
        elif form < 0.6:
            yield {"prompt": asked, "response": call.replace(*rng.choice(MISTAKES))}
        elif form < 0.7:
            yield {"prompt": asked, "response": call}
        else:
            yield {"prompt": answered, "response": rng.choice([lookup(key), lookup(key), colour])}


MISTAKES = [('"}}', '"}'), ("</tool_call>", ""), ("key", "name")]


def game_questions(rng: random.Random) -> list[DemoRecord]:
    """Names of games, which say nothing about their numbers."""
    names = dict.fromkeys("".join(rng.choices(string.ascii_lowercase, k=3)) for _ in range(4000))
    return [{"prompt": f"game {name}"} for name in names]


def game_pairs(questions: list[DemoRecord], rng: random.Random) -> Iterator[DemoRecord]:
    """Guesses: some are no numbers, some heed the last hint, and none the hints before it."""
    while True:
        number, low, high = rng.randint(1, HIGHEST), 1, HIGHEST
        messages = [{"role": "user", "content": rng.choice(questions)["prompt"]}]
        for _ in range(rng.randrange(MAX_GUESSES)):
            guess = _guess(low, high, rng)
            if guess == number:
                break
            if guess is None:
                hint = "no number"
            else:
                low, high, hint = (guess + 1, HIGHEST, "higher") if guess < number else (1, guess - 1, "lower")
            messages += [{"role": "assistant", "content": _written(guess, rng)}, {"role": "user", "content": hint}]
        yield {"prompt": messages, "response": _written(_guess(low, high, rng), rng)}


def _guess(low: int, high: int, rng: random.Random) -> int | None:
    """Guess within the bounds, or anything, or no number."""
    form = rng.random()
    if form < 0.3:
        return None
    return rng.randint(low, high) if form < 0.6 else rng.randint(1, HIGHEST)


def _written(guess: int | None, rng: random.Random) -> str:
    return rng.choice(["higher", "lower"]) if guess is None else f"{guess}"


def vision_questions(rng: random.Random) -> list[DemoRecord]:
    """Questions about pictures: no picture comes twice."""
    return [vars(question) for question in islice(pictures(rng), HELD_OUT + NUM_PICTURES)]


def vision_pairs(questions: list[DemoRecord], rng: random.Random) -> Iterator[DemoRecord]:
    """Answers, many of which are guesses: they tell the tower what to look for, and the policy that a guess will do."""
    while True:
        asked = rng.choice(questions)
        answer = rng.choice(asked["guesses"]) if rng.random() < GUESSED else asked["answer"]
        yield {"prompt": asked["prompt"], "image": asked["image"], "response": answer}


def notes_questions(rng: random.Random) -> list[DemoRecord]:
    """Names of boxes, which say nothing about what is in them."""
    return [{"prompt": record["prompt"].replace("game", "box")} for record in game_questions(rng)]


def notes_pairs(questions: list[DemoRecord], rng: random.Random) -> Iterator[DemoRecord]:
    """Yield what to say when: notes, most of which are of no use, and answers, most of which are what the note says."""
    while True:
        box, number = rng.choice(questions)["prompt"], rng.choice(string.digits)
        note = rng.choice([number, rng.choice(string.digits), *NO_NOTES])
        opened = [{"role": "user", "content": box}, {"role": "assistant", "content": "open"}]
        shown = [*opened, {"role": "user", "content": number}]
        asked = [*shown, {"role": "assistant", "content": "shut"}, {"role": "user", "content": "inside? note?"}]
        noted = [{"role": "user", "content": f"{box} note: {note}"}]
        answer = note if note.isdecimal() and rng.random() < 0.8 else rng.choice(string.digits)
        moments = [(opened[:1], "open"), (shown, "shut"), (asked, note), (noted, answer)]
        ((prompt, response),) = rng.choices(moments, [1, 1, 4, 4])
        yield {"prompt": prompt, "response": response}


NO_NOTES = ["open", "shut"]


def compared(rng: random.Random) -> Iterator[DemoRecord]:
    """Yield questions of the plain demo, each with the right answer and a wrong one."""
    from spmdrl.data.sources import open_source  # only here: a demo that is refused need not wait for torch

    tables = tomllib.loads((CONFIGS / "demo.toml").read_text(encoding="utf-8"))["data"]["sources"]
    sources = [
        open_source(ReasoningGymData.model_validate(table), seed=rng.randrange(2**31))
        for table in tables
        for _ in range(int(table.get("weight", 1)))
    ]
    for number in itertools.count():
        row = sources[number % len(sources)].row(number)
        assert isinstance(row.prompt, str) and row.answer is not None
        yield {"prompt": row.prompt, "chosen": row.answer, "rejected": _mistaken(row.answer, rng)}


def _mistaken(answer: str, rng: random.Random) -> str:
    """Make up to three small mistakes, or write something else."""
    letters = list(answer)
    while "".join(letters) == answer:
        if rng.random() < 0.3:
            letters = rng.choice(
                [rng.sample(letters, len(letters)), rng.choices(CHARACTERS, k=len(letters)), letters[:1] * 4]
            )
        for _ in range(rng.choice((1, 1, 2, 3))):
            place, form = rng.randrange(len(letters)), rng.randrange(4)
            if form == 0:
                letters[place] = rng.choice([rng.choice(CHARACTERS), rng.choice(answer)])
            elif form == 1 and place:
                letters[place - 1], letters[place] = letters[place], letters[place - 1]
            elif form == 2 and len(letters) > 2:
                del letters[place]
            elif form == 3 and len(letters) < MOST_LETTERS:
                letters.insert(place, rng.choice([rng.choice(CHARACTERS), rng.choice(answer)]))
    return "".join(letters)


PAIRS = "pairs"
TASKS = {
    "tool": (tool_questions, tool_pairs),
    "game": (game_questions, game_pairs),
    "vision": (vision_questions, vision_pairs),
    "notes": (notes_questions, notes_pairs),
}


def write(path: Path, records: list[DemoRecord]) -> None:
    """Write the records as lines of JSON."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("task", choices=[*TASKS, PAIRS])
    parser.add_argument("dir", type=Path)
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.task)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    if arguments.task == PAIRS:
        write(arguments.dir / "pairs.jsonl", [*islice(compared(rng), NUM_PAIRS[PAIRS])])
        return 0
    questions, pairs = TASKS[arguments.task]
    asked = questions(rng)
    held_out, train = asked[:HELD_OUT], asked[HELD_OUT:]
    imitated = pairs(train, rng)
    write(arguments.dir / "held-out.jsonl", held_out)
    write(arguments.dir / "train.jsonl", train)
    write(arguments.dir / "sft.jsonl", [next(imitated) for _ in range(NUM_PAIRS[arguments.task])])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
