"""A second task by self-distillation and by fine-tuning on the same rows: what is left of the first task?

    first    write a word backward
    second   keys, which have to be known by heart: each row has a demonstration in somebody else's words

A tiny model learns the first task, and to answer about keys that a demonstration before the question names. Then, with
the second task's rows alone, it goes on in two ways, with as many sequences, steps and the same learning rate: from its
own answers, taught by itself with the demonstration in its prompt; and by the cross entropy of the demonstrations. Half
of the first way's prompts are the first task's, without any answer, taught by the weights of the beginning; --no-keep
leaves them out.
An answer is right whose last word is the reference answer, whatever stands before it. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomlkit
import workload
from results import provenance, write_result

HERE = Path(__file__).resolve().parent
LETTERS = "abcdefghij"
SAYING = "I think that it is {}."
DATA = {"kind": "jsonl", "answer_column": "answer"}
WORD_LETTERS, HELD_OUT = 4, 200


def right(*, prompt: str, response: str, answer: str, metadata: Mapping[str, Any]) -> float:
    """1 where the last word of a response is the answer."""
    return float(response.strip(" .").rpartition(" ")[2] == answer)


def word(rng: random.Random, letters: int) -> str:
    """A word that says nothing."""
    return "".join(rng.choice(LETTERS) for _ in range(letters))


def backward(rng: random.Random) -> dict[str, str]:
    """A row of the first task."""
    one = word(rng, WORD_LETTERS)
    return {"prompt": f"{one} backward:", "answer": one[::-1], "response": one[::-1]}


def key(name: str, value: str) -> dict[str, str]:
    """A row of the second task."""
    shown = SAYING.format(value)
    return {"prompt": f"key of {name}:", "answer": value, "response": value, "demonstration": shown}


def shown(rng: random.Random) -> dict[str, str]:
    """A row of some other key, with its demonstration before the question."""
    row = key(word(rng, 3), word(rng, 3))
    return {**row, "prompt": f"{row['demonstration']}\n{row['prompt']}"}


def write(path: Path, rows: Iterable[Mapping[str, str]]) -> str:
    """Write a file of rows; returns its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


class Stages:
    """Programs of spmdrl that run one after the other in a folder."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder = folder
        self._environment = {**os.environ, **workload.best_environment(threads=threads)}
        self._threads = threads

    def run(self, program: str, name: str, **tables: Any) -> str:
        """Run a program with these tables, unless it has run here before; returns the directory of its model."""
        if (self._folder / name / "hf/config.json").is_file():
            return str(self._folder / name / "hf")
        settings = {
            "run": {"name": name, "dir": str(self._folder), "seed": 1, "threads_per_rank": self._threads},
            "pack": {"max_tokens_per_micro_batch": 8192},
            "report": {"tensorboard": False, "console": "plain"},
        }
        merged = {table: {**settings.get(table, {}), **tables.get(table, {})} for table in {**settings, **tables}}
        file = self._folder / f"{name}.toml"
        file.write_text(tomlkit.dumps(merged), encoding="utf-8")
        self.python("-m", f"spmdrl.{program}", str(file))
        return str(self._folder / name / "hf")

    def accuracies(self, model: str, data: str) -> dict[str, float]:
        """The shares of right answers to the questions of both tasks in a file."""
        items = self._folder / "items.jsonl"
        given = ["--data", data, "--reward", f"{HERE}/self_distillation.py:right", "--items", str(items)]
        overrides = ["data.max_prompt_tokens=32", "rollout.max_response_tokens=28", "eval.temperature=0.0"]
        self.python("-m", "spmdrl.tools.evaluate", model, *given, *overrides)
        rows = [json.loads(line) for line in items.read_text(encoding="utf-8").splitlines()]
        right_of = {
            task: [row["right"][0] for row in rows if row["prompt"].startswith("key of") == (task == "second")]
            for task in ("first", "second")
        }
        return {task: statistics.fmean(found) for task, found in right_of.items()}

    def python(self, *arguments: str) -> str:
        """Run Python; returns what it writes."""
        done = subprocess.run(
            [sys.executable, *arguments], env=self._environment, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train and evaluate."""
    rng, stages = random.Random(0), Stages(folder, args.threads)
    keys = {word(rng, 3): word(rng, 3) for _ in range(args.keys)}
    facts = [key(*one) for one in keys.items()] * (-(-args.sequences // args.keys))
    begins = [row for _ in range(args.rows) for row in (backward(rng), shown(rng))]
    asked = [*(backward(rng) for _ in range(HELD_OUT)), *(key(*one) for one in keys.items())]
    both = write(folder / "both.jsonl", asked)
    base = str(folder / "base")
    if not Path(base).exists():
        stages.python("-m", "spmdrl.tools.tiny_model", base, "--num-layers", "2", "--hidden-size", str(args.hidden))
    start = stages.run("sft", "start", **_sft(base, write(folder / "begin.jsonl", begins), "response", args))
    sources = [{**DATA, "task": "keys", "path": write(folder / "own.jsonl", facts)}]
    name = "before" if args.teacher == "start" else "self"
    models = {name: {"path": start} if args.teacher == "start" else {"weights": args.teacher}}
    teachers = [{"model": name, "tasks": ["keys"], "hint_column": "demonstration"}]
    if args.keep:
        words = [
            {name: row[name] for name in ("prompt", "answer")} for row in (backward(rng) for _ in range(args.rows))
        ]
        sources.append({**DATA, "task": "words", "path": write(folder / "words.jsonl", words)})
        teachers.append({"model": "before", "tasks": ["words"]})
        models["before"] = {"path": start}
    own = stages.run(
        "train",
        "own",
        run={"num_steps": args.steps},
        model={"path": start},
        data={"max_prompt_tokens": 32, "sources": sources},
        rollout={"prompts_per_step": args.sequences, "group_size": 1, "max_response_tokens": 6},
        models=models,
        distill={
            "teachers": teachers,
            "divergence": args.divergence,
            "hint_template": "{hint}\n{question}",
            "max_hint_tokens": 32,
        },
        advantage={"estimator": "none"},
        reward={"terms": []},
        optim={"lr": args.lr},
    )
    tuned = stages.run("sft", "tuned", **_sft(start, str(folder / "own.jsonl"), "demonstration", args))
    models = {"start": start, "self_distillation": own, "fine_tuning": tuned}
    return {name: stages.accuracies(model, both) for name, model in models.items()}


def _sft(model: str, path: str, column: str, args: argparse.Namespace) -> dict[str, Any]:
    is_start = column == "response"
    source = {**DATA, "path": path, "answer_column": "", "response_column": column}
    warm_up = {"schedule": "linear", "warmup_steps": min(20, args.start_steps), "betas": [0.9, 0.98]}
    return {
        "run": {"num_steps": args.start_steps if is_start else args.steps},
        "model": {"path": model},
        "data": {"max_prompt_tokens": 64, "sources": [source]},
        "sft": {"sequences_per_step": 64 if is_start else args.sequences, "max_response_tokens": 28},
        "optim": {"lr": 2e-3 if is_start else args.lr, **(warm_up if is_start else {})},
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--hidden", type=int, default=96, help="width of the model")
    parser.add_argument("--keys", type=int, default=16, help="of the second task")
    parser.add_argument("--rows", type=int, default=8000, help="of each kind that it begins with")
    parser.add_argument("--start-steps", type=int, default=800, help="of its beginning")
    parser.add_argument("--steps", type=int, default=300, help="of the second task")
    parser.add_argument("--sequences", type=int, default=128, help="in each of these")
    parser.add_argument("--lr", type=float, default=1e-4, help="of these")
    parser.add_argument("--divergence", default="forward", help="from the teacher")
    parser.add_argument(
        "--teacher",
        default="start",
        help="the teacher's weights: policy, average, lagged, or start for those of the beginning",
    )
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prompts of the first task too, taught by the beginning",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--folder", type=Path, help="where the runs stay")
    parser.add_argument("--result", type=Path, help="file to write")
    args = parser.parse_args(argv)
    began = provenance()
    with tempfile.TemporaryDirectory() as name:
        folder = args.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        found = measure(args, folder.resolve())
    kept = {way: found[way]["first"] / max(found["start"]["first"], 1e-9) for way in found}
    settings = {name: value for name, value in vars(args).items() if name not in ("folder", "result")}
    result = {**began, "settings": settings, "accuracy": found, "kept": kept}
    if args.result is not None:
        write_result(args.result, {**result, "versions": workload.versions(["torch", "transformers"])})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
