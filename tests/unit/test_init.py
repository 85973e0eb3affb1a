"""`spmdrl init`: a configuration for a model and a file that nobody has described, which passes its check."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from spmdrl.tools.init import main
from spmdrl.tools.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "model"
    save_tiny_model(folder, num_layers=1, hidden_size=32)
    return folder


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n} + 1 =", "label": str(n + 1)}) + "\n" for n in range(100)))
    return file


def written(path: str = "mine.toml") -> dict[str, Any]:
    return tomllib.loads(Path(path).read_text())


def test_lengths_and_columns_are_those_of_the_data(model: Path, sums: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "0"]
    assert main(given) == 0  # it has passed its dry run
    assert "spmdrl train mine.toml" in capsys.readouterr().out
    tables = written()
    (source,) = tables["data"]["sources"]
    assert (source["prompt_column"], source["answer_column"]) == ("question", "label")
    assert tables["data"]["max_prompt_tokens"] == 16 and "# the longest of 100 has 8" in Path("mine.toml").read_text()
    assert tables["eval"]["num_prompts"] == 10 and tables["eval"]["sources"] == tables["data"]["sources"]
    assert tables["rollout"]["prompts_per_step"] == 64 and len(sums.read_text().splitlines()) > 64
    assert main([*given, "--answer-column", "lable"]) == 2  # both mistakes at once
    told = capsys.readouterr().err
    assert "mine.toml is there already; name another file with --out" in told
    assert "--answer-column lable: the data has label" in told


def test_a_step_has_no_more_prompts_than_the_data(model: Path, sums: Path) -> None:
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[:33]))
    assert main(["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "0"]) == 0
    assert written()["rollout"]["prompts_per_step"] == 30 and written()["eval"]["num_prompts"] == 3


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang's share of memory is what has to fit")
def test_memory_is_planned_for_gpus_that_are_not_here(model: Path, sums: Path) -> None:
    given = ["--model", str(model), "--data", str(sums), "--reward", "exact", "--gpus", "2", "--gpu-gib", "4"]
    assert main(given) == 0
    assert "so that it fits into 4 GiB" in Path("mine.toml").read_text()


def test_what_is_not_given_is_asked_on_a_terminal(model: Path, sums: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: Iterator[str] = iter([str(model), str(sums), "", "exact"])
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", answer)
    assert main(["--gpus", "0", "--out", "asked.toml"]) == 0
    again = "reward, math, exact, code or my.py:function: "
    assert asked == ["model directory: ", "file of data, jsonl or parquet: ", again, again]
    assert written("asked.toml")["reward"] == {"terms": [{"kind": "exact"}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--model": None}, "--model is needed (model directory): there is no terminal to ask on"),
        ({"--data": "sums.csv"}, "--data sums.csv: its name ends with none of .jsonl, .parquet"),
        ({"--data": "none.jsonl"}, "cannot read none.jsonl: No such file or directory"),
        ({"--prompt-column": "text"}, "--prompt-column text: the data has question, label"),
        ({"--reward": "best"}, "--reward best: it is one of math, exact, code, or a function such as my.py:score"),
        ({"--answer-column": ""}, "--reward exact compares with a reference answer; name its column"),
        ({"--reward": "my.py:score"}, "there is no file my.py"),
    ],
)
def test_mistakes_are_told_and_write_nothing(
    changes: dict[str, str | None], words: str, model: Path, sums: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--model": str(model), "--data": "sums.jsonl", "--reward": "exact", "--gpus": "0"} | changes
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    assert main(given) == 2
    assert words in capsys.readouterr().err
    assert not Path("mine.toml").exists()
