"""Write the data of a demo with an environment: `python launch/demo_data.py tool|game DIR`.

train.jsonl and held-out.jsonl hold questions, none of them in both. sft.jsonl holds what the warm start imitates: a
policy that knows the forms of what it may write, and not what leads to success.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "configs"))
from demo_tool import COLOURS, lookup

NUM_PAIRS = 20_000
HELD_OUT = 400
HIGHEST, MAX_GUESSES = 16, 5  # of configs/demo-game.toml

Record = dict[str, Any]


def tool_questions(rng: random.Random) -> list[Record]:
    """Every key once, in a random order."""
    keys = [f"{a}{b}{digit}" for a in string.ascii_lowercase for b in string.ascii_lowercase for digit in range(10)]
    rng.shuffle(keys)
    return [{"prompt": f"colour of {key}?", "answer": lookup(key)} for key in keys]


def tool_pairs(questions: list[Record], rng: random.Random) -> Iterator[Record]:
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


def game_questions(rng: random.Random) -> list[Record]:
    """Names of games, which say nothing about their numbers."""
    names = {"".join(rng.choices(string.ascii_lowercase, k=3)) for _ in range(4000)}
    return [{"prompt": f"game {name}"} for name in sorted(names, key=lambda name: rng.random())]


def game_pairs(questions: list[Record], rng: random.Random) -> Iterator[Record]:
    """Guesses, some of which heed the last hint, and none the hints before it."""
    while True:
        number, low, high = rng.randint(1, HIGHEST), 1, HIGHEST
        messages = [{"role": "user", "content": rng.choice(questions)["prompt"]}]
        for _ in range(rng.randrange(MAX_GUESSES)):
            guess = _guess(low, high, rng)
            if guess == number:
                break
            low, high, hint = (guess + 1, HIGHEST, "higher") if guess < number else (1, guess - 1, "lower")
            messages += [{"role": "assistant", "content": f"{guess}"}, {"role": "user", "content": hint}]
        yield {"prompt": messages, "response": f"{_guess(low, high, rng)}"}


def _guess(low: int, high: int, rng: random.Random) -> int:
    """Guess within the bounds now and then, and else anything."""
    return rng.randint(low, high) if rng.random() < 0.4 else rng.randint(1, HIGHEST)


TASKS = {"tool": (tool_questions, tool_pairs), "game": (game_questions, game_pairs)}


def write(path: Path, records: list[Record]) -> None:
    """Write the records as lines of JSON."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("dir", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.task)
    questions, pairs = TASKS[arguments.task]
    asked = questions(rng)
    held_out, train = asked[:HELD_OUT], asked[HELD_OUT:]
    imitated = pairs(train, rng)
    arguments.dir.mkdir(parents=True, exist_ok=True)
    write(arguments.dir / "held-out.jsonl", held_out)
    write(arguments.dir / "train.jsonl", train)
    write(arguments.dir / "sft.jsonl", [next(imitated) for _ in range(NUM_PAIRS)])


if __name__ == "__main__":
    main()
