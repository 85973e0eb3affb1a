"""lm-eval-harness, unchanged, against `spmdrl serve`: its score of a model is the one of its own `hf` backend.

It has an environment of its own, `.venv-lmeval`, which `make setup-lmeval` makes; without it this is skipped.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.tools.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("LM_EVAL_PYTHON", ROOT / ".venv-lmeval/bin/python"))
NUM_ITEMS = 200
CHOICE = """\
task: sums_chosen
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
SAID = """\
task: sums_said
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[gold]}}"
process_results: !function letters.letters
generation_kwargs: {until: ["q"], max_gen_toks: 8, do_sample: false, temperature: 0}
metric_list: [{metric: letters, aggregation: mean, higher_is_better: true}]
"""
# Of a model that knows nothing: a score that still differs between responses.
LETTERS = """\
def letters(doc, results):
    return {"letters": len(set(results[0])) / 8}
"""
needs_lm_eval = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv-lmeval; `make setup-lmeval` makes it")


def write_tasks(folder: Path) -> None:
    rng = random.Random(0)
    rows = []
    for _ in range(NUM_ITEMS):
        one, other = rng.randrange(10), rng.randrange(10)
        wrong = rng.sample([total for total in range(19) if total != one + other], 3)
        choices = [f" {total}" for total in rng.sample([one + other, *wrong], 4)]
        rows.append({"question": f"{one} + {other} =", "choices": choices, "gold": choices.index(f" {one + other}")})
    (folder / "items.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("chosen.yaml", CHOICE), ("said.yaml", SAID)):
        (folder / name).write_text(text.replace("ITEMS", str(folder / "items.json")))
    (folder / "letters.py").write_text(LETTERS)


def save_model(folder: Path) -> None:
    """A tiny model whose greedy responses differ: at its usual start it only repeats the last token, which in a chat is
    one that nobody reads."""
    save_tiny_model(folder, num_layers=2, chat=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """The address at which the program serves a model."""
    command = [sys.executable, "-m", "spmdrl.tools.command", "serve", str(model), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith("serving "))
        yield line.split(" at ")[1].split(",")[0]
    finally:
        server.terminate()
        server.wait()


@needs_lm_eval
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_scores_through_the_server_are_those_of_its_own_backend(tmp_path: Path) -> None:
    tasks, model = tmp_path / "tasks", tmp_path / "model"
    tasks.mkdir()
    write_tasks(tasks)
    save_model(model)
    own = {"model": "hf", "model_args": f"pretrained={model},dtype=float32", "device": "cpu", "batch_size": 16}
    said, both = {"tasks": ["sums_said"]}, {"tasks": ["sums_chosen", "sums_said"]}
    with serving(model) as url:
        asked = f"tokenizer={model},max_retries=1"
        completions = {
            "model": "local-completions",
            "model_args": f"base_url={url}/completions,{asked}",
            "batch_size": 16,
        }
        chat = {"model": "local-chat-completions", "model_args": f"base_url={url}/chat/completions,{asked}"}
        job = {
            "tasks": str(tasks),
            "out": str(tmp_path / "found.json"),
            "runs": [
                own | both,
                completions | both,
                own | said | {"apply_chat_template": True},
                chat | said | {"apply_chat_template": True},
            ],
        }
        (tmp_path / "job.json").write_text(json.dumps(job))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        program = [str(PYTHON), str(ROOT / "tests/helpers/lm_eval_scores.py"), str(tmp_path / "job.json")]
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
    own_text, served_text, own_chat, served_chat = json.loads((tmp_path / "found.json").read_text())
    for expected, found in ((own_text, served_text), (own_chat, served_chat)):
        assert scores(found) == scores(expected)
        assert found["responses"]["sums_said"] == expected["responses"]["sums_said"]
        said_once = {json.dumps(item) for item in found["responses"]["sums_said"]}
        assert len(said_once) > 20 and len(found["responses"]["sums_said"]) == NUM_ITEMS
    for expected, found in zip(chosen(own_text), chosen(served_text), strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert len(chosen(own_text)) == 4 * NUM_ITEMS and 0 < own_text["scores"]["sums_chosen"]["acc,none"] < 1


def scores(found: dict[str, Any]) -> dict[str, Any]:
    return {
        (task, name): value
        for task, values in found["scores"].items()
        for name, value in values.items()
        if name.endswith(",none")
    }


def chosen(found: dict[str, Any]) -> list[float]:
    """The log-probability of every choice of every item."""
    return [float(choice[0][0]) for item in found["responses"]["sums_chosen"] for choice in item]
