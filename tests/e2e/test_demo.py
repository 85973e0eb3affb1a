"""The demos with an environment or with pictures: what `make demo TASK=...` shows, and that its files fit together."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from spmdrl import sft, train
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.doc_commands import blocks
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import rows, sample_rows, without_curves

ROOT = Path(__file__).parents[2]
SMALL = ("run.num_steps=1", "optim.warmup_steps=0", "rollout.prompts_per_step=8", "eval.num_prompts=8")


def sources(table: str, path: Path, **columns: str) -> str:
    """The setting that replaces a table's only source by a file."""
    others = "".join(f', {name} = "{column}"' for name, column in columns.items())
    return f'{table}.sources=[{{ kind = "jsonl", path = "{path}"{others} }}]'


COLUMNS = {
    "tool": {},
    "game": {"answer_column": ""},
    "vision": {"image_column": "image"},
    "notes": {"answer_column": ""},
}


@pytest.mark.slow
@pytest.mark.parametrize("task", ["tool", "game", "notes", "vision"])
def test_the_files_of_a_demo_fit_together(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the warm start, and one of what follows it, with a model whose words are characters."""
    monkeypatch.chdir(ROOT)
    data = tmp_path / "data"
    subprocess.run([sys.executable, "launch/demo_data.py", task, data], check=True)
    form = {"vision": True} if task == "vision" else {"chat": True}
    save_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32, max_tokens=512, **form)
    columns = COLUMNS[task]
    imitate = [
        f"configs/demo-{task}-sft.toml",
        *(f"run.dir={tmp_path}", "run.name=sft", "run.num_steps=1", "optim.warmup_steps=0", "sft.sequences_per_step=8"),
        *(f"model.path={tmp_path}/model", "data.max_prompt_tokens=200", "sft.max_response_tokens=80"),
        sources("data", data / "sft.jsonl", **columns | {"answer_column": "", "response_column": "response"}),
    ]
    assert run_ranks(1, without_curves, sft.main, imitate) == [0]
    learn = [
        f"configs/demo-{task}.toml",
        *(f"run.dir={tmp_path}", "run.name=rl", f"model.path={tmp_path}/sft/hf", "data.max_prompt_tokens=48"),
        sources("data", data / "train.jsonl", **columns),
        sources("eval", data / "held-out.jsonl", **columns),
        *SMALL,
    ]
    assert run_ranks(1, without_curves, train.main, learn) == [0]
    assert [row["step"] for row in rows(tmp_path / "rl")] == [0, 1]
    assert sample_rows(tmp_path / "rl")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("task", "most_before", "settings"),
    [
        ("tool", 0.4, ()),
        ("game", 0.4, ()),
        ("vision", 0.5, ()),
        ("notes", 0.5, ()),
        ("text", 0.5, ("lora.rank=8",)),
        ("distill", 0.5, ()),
    ],
)
def test_a_tiny_model_learns_its_task(task: str, most_before: float, settings: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "launch/demo.sh", f"run.dir={tmp_path}", "run.name=demo", *settings],
        cwd=ROOT,
        env=os.environ | {"TASK": task},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = [row["eval/accuracy"] for row in rows(tmp_path / "demo") if "eval/accuracy" in row]
    assert accuracies[0] <= most_before and accuracies[-1] >= 0.85, accuracies
    exported = re.search(r'^\{"eval/accuracy": ([\d.]+)', done.stdout, re.MULTILINE)
    assert exported and float(exported[1]) == pytest.approx(accuracies[-1], abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_summary_that_is_not_trained_does_not_learn_what_to_say(tmp_path: Path) -> None:
    words = ["bash", "launch/demo.sh", f"run.dir={tmp_path}", "run.name=demo"]
    masked = "environment.context.train_summaries=false"
    done = subprocess.run(
        [*words, masked], cwd=ROOT, env=os.environ | {"TASK": "notes"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row.get("eval/accuracy", 0.0) <= 0.5 for row in rows(tmp_path / "demo"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_policy_games_a_model_of_pairs_and_that_is_seen(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "launch/demo.sh", f"run.dir={tmp_path}", "run.name=demo"],
        cwd=ROOT,
        env=os.environ | {"TASK": "pairs"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranked = [row["eval/accuracy"] for row in rows(tmp_path / "demo-rank") if "eval/accuracy" in row]
    assert ranked[-1] >= 0.85, ranked
    steps = rows(tmp_path / "demo")
    truth, model = ([row[f"reward/part_{name}"] for row in steps] for name in ("exact", "model"))
    assert model[-1] > model[0] + 0.3 and truth[-1] < truth[0] - 0.2, (truth, model)
    assert "within groups: correlation" in done.stdout


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEMOS = sorted(
    {
        command
        for page in PAGES
        for block in blocks(page)
        for command in block.commands
        if command.startswith("make demo") and "TASK=" not in command and "ENGINE=" not in command
    }
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", DEMOS)
def test_the_demos_of_the_pages_run(command: str, tmp_path: Path) -> None:
    """With the settings that a page gives them, for two steps."""
    settings = [word.removeprefix("ARGS=").split() for word in shlex.split(command) if word.startswith("ARGS=")]
    short = [f"run.dir={tmp_path}", "run.name=demo", "run.num_steps=2", "optim.warmup_steps=1", "eval.num_prompts=40"]
    short += ["critic.warmup_steps=1"] if "critic." in command else []
    words = ["bash", "launch/demo.sh", *chain(*settings), *short]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in rows(tmp_path / "demo")] == [0, 1, 2]
    assert re.search(r'^\{"eval/accuracy": ', done.stdout, re.MULTILINE)
