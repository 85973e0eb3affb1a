"""Every example of docs/extending.md and docs/environments.md, and that of the README, runs as it is printed."""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.train import main
from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "extending.md", ROOT / "docs" / "environments.md", ROOT / "docs" / "first-run.md")
SECTION = re.compile(r"^##+ (?P<title>[^\n]+)$(?P<body>.*?)(?=^##|\Z)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```(python|toml)(?: title=\"[^\"]+\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
METRIC = re.compile(r"`((?:loss|advantage)/\w+)`")
FILE = re.compile(r'"(\w+\.py):\w+"')

CONFIG = """\
[run]
name = "run"
num_steps = 2
[model]
path = "model"
[data]
max_prompt_tokens = 24
[[data.sources]]
kind = "reasoning_gym"
task = "chain_sum"
params = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
prompt_template = "{metadata[expression]} ="
[rollout]
prompts_per_step = 2
group_size = 4
max_response_tokens = 6
[reward]
terms = [{ kind = "exact" }]
[optim]
lr = 1e-3
[pack]
max_tokens_per_micro_batch = 256
"""


@dataclass(frozen=True, slots=True)
class Example:
    """The code and the settings that a section of the page shows."""

    title: str
    code: str
    settings: str  # which name the code's file
    metrics: list[str]  # that the section promises

    @property
    def file(self) -> str:
        """The file that the settings name."""
        (name,) = set(FILE.findall(self.settings))
        return name


def examples() -> list[Example]:
    """The sections that have code."""
    found = []
    for section in SECTION.finditer("".join(page.read_text(encoding="utf-8") for page in PAGES)):
        blocks = dict(BLOCK.findall(section["body"]))
        if blocks.keys() == {"python", "toml"} and FILE.search(blocks["toml"]):  # agents: tests/unit/test_agent.py
            found.append(Example(section["title"], blocks["python"], blocks["toml"], METRIC.findall(section["body"])))
    return found


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: settings.get(name, {}) | changes.get(name, {})
        if isinstance(changes.get(name, {}), dict)
        else changes[name]
        for name in settings | changes
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models that examples name: one of text, and one that looks at images."""
    path = tmp_path_factory.mktemp("extending")
    save_tiny_model(path / "model", num_layers=1)
    save_tiny_model(path / "eyes", num_layers=1, vision=True)
    return path


def _trained_in(folder: Path) -> int:
    os.chdir(folder)
    return main(["config.toml"])


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.title)
def test_an_example_runs_as_it_is_printed(example: Example, models: Path, tmp_path: Path) -> None:
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Game 1."}\n{"prompt": "Game 2."}\n')
    (tmp_path / example.file).write_text(example.code)
    settings = merged(tomllib.loads(CONFIG), tomllib.loads(example.settings))
    (tmp_path / "config.toml").write_text(tomlkit.dumps(settings))
    assert run_ranks(1, _trained_in, tmp_path, timeout_s=250.0) == [0]
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs" / settings["run"]["name"] / "metrics.jsonl").read_text().splitlines()
    ]
    assert set(example.metrics) <= set(rows[-1])


def test_the_page_shows_every_door() -> None:
    shown = "".join(example.settings for example in examples())
    assert all(f"[{table}]" in shown for table in ("reward", "loss", "advantage", "optim", "rollout", "environment"))
