"""The miniature of each recipe: its own file with other sizes and paths and the torch engine, on tiny models with the
settings of its own, and on data of the form of its own."""

from __future__ import annotations

import json
import runpy
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tomlkit

from spmdrl import pairs, train
from spmdrl.tools.model_shrink import save_tiny, shrunk
from spmdrl.tools.model_source import source_of
from spmdrl.tools.tiny_model import character_tokenizer
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import REWARD, rows, without_curves
from tests.helpers.vision import as_file, photo, save_vision_files
from tests.helpers.vision_models import save_qwen2_5_vl

RECIPES = Path(__file__).parents[2] / "configs/recipes"
# Released settings of the recipes' families, by the beginning of their names.
FAMILIES = {"Qwen2.5-VL": None, "Qwen2.5": "qwen2.5-7b", "Qwen3-32B": "qwen3-32b", "Qwen3": "qwen3-0.6b"}
# What a miniature changes; everything else is the recipe's.
SIZES: dict[str, Any] = {
    "run.num_steps": 2,
    "data.max_prompt_tokens": 160,
    "data.max_pixels": 1024,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_response_tokens": 24,
    "rollout.max_running": 16,
    "reward.overlong_tokens": 8,
    "environment.max_turn_tokens": 12,
    "loss.updates_per_step": 2,
    "lora.rank": 4,
    "pairs.pairs_per_step": 4,
    "pairs.max_response_tokens": 64,
    "optim.warmup_steps": 1,
    "pack.max_tokens_per_micro_batch": 1024,
    "eval.num_prompts": 4,
    "eval.every": 2,
    "eval.samples_per_prompt": 2,
    "held_out.num_prompts": 4,
    "held_out.every": 2,
    "checkpoint.every": 2,
    "rollout.engine": "torch",
}
ALWAYS = ("dpo", "gsm8k")  # the others are slow
ONLY_FOR_SGLANG = ("rollout.tp_size", "rollout.memory_fraction")
MORE_TURNS = {"rollout.max_response_tokens": 200, "data.max_prompt_tokens": 400}
CHANGES: Mapping[str, dict[str, Any]] = {
    "tool": MORE_TURNS,
    "wordle": MORE_TURNS,
    "opd": {"rollout.group_size": 1},
    "vision": {"data.max_prompt_tokens": 200},
}
"""Sizes of one recipe."""


def problems(first: int) -> Iterator[dict[str, Any]]:
    """Sums of one digit, which a model of characters guesses now and then, with all columns of the recipes' data."""
    for number in range(first, first + 12):
        text, answer = f"{number} - {number - number % 10} =", str(number % 10)
        asked = [{"role": "user", "content": text}]
        better, worse = ([*asked, {"role": "assistant", "content": said}] for said in (answer, "no"))
        yield {"question": text, "answer": f"Add.\n#### {answer}", "chosen": better, "rejected": worse} | {
            "prompt": asked,
            "label": answer,
        }


def write_data(path: Path, *, name: str, first: int) -> None:
    path.parent.mkdir(exist_ok=True)
    if name == "wordle":
        game = runpy.run_path(str(RECIPES / "wordle.py"))
        found = [{"prompt": f"{game['PROMPT']} This is game {number}.", "answer": ""} for number in range(12)]
    else:
        found = list(problems(first))
    if name == "vision":
        found = [
            {
                "images": [{"bytes": as_file(photo(20, 20, seed=first + place)), "path": None}],
                "problem": f"<image>{row['question']}",
                "answer": row["label"],
            }
            for place, row in enumerate(found)
        ]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in found))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path)


def write_model(path: Path, hub_name: str) -> None:
    """A tiny model with the settings of the family, and a tokenizer of characters."""
    model = hub_name.rpartition("/")[2]
    family = next(settings for name, settings in FAMILIES.items() if model.startswith(name))
    if family is None:
        save_qwen2_5_vl(path, eos_token_id=1, pad_token_id=0)
        save_vision_files(path)
    else:
        save_tiny(shrunk(source_of(family).config), path)
        character_tokenizer(chat=True).save_pretrained(path)


def flat(table: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in table.items():
        yield from flat(value, f"{before}{name}.") if isinstance(value, dict) else [f"{before}{name}"]


def miniature(folder: Path, name: str) -> Path:
    """Write the recipe's settings with other sizes and paths, and what it reads."""
    settings = tomllib.loads((RECIPES / f"{name}.toml").read_text())
    for setting, value in (SIZES | CHANGES.get(name, {})).items():
        table, _, key = setting.rpartition(".")
        if key in settings.get(table, {}):
            settings[table][key] = value
    for setting in ONLY_FOR_SGLANG:
        settings.get("rollout", {}).pop(setting.partition(".")[2], None)
    settings.pop("offload", None)  # of a GPU's memory
    for one in (settings["model"], *settings.get("models", {}).values()):
        path = folder / one["path"].rpartition("/")[2]
        write_model(path, one["path"])
        one["path"] = str(path)
    for place, table in enumerate(("data", "eval", "held_out")):
        for source in settings.get(table, {}).get("sources", ()):
            path = folder / f"{table}.{source['kind']}"
            write_data(path, name=name, first=20 * place)
            source["path"] = str(path)
    if settings.get("rollout", {}).get("dynamic_sampling"):  # for ever, where a model that knows nothing earns nothing
        (folder / "reward.py").write_text(REWARD)
        settings["reward"]["terms"].append({"kind": "function", "function": f"{folder}/reward.py:digits"})
    settings["run"] |= {"dir": str(folder), "name": "run"}
    (folder / "c.toml").write_text(tomlkit.dumps(settings))
    return folder / "c.toml"


NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in NAMES]
)
def test_a_recipe_in_miniature_runs_to_its_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parents[1])
    program: Callable[[list[str]], int] = pairs.main if name == "dpo" else train.main
    assert run_ranks(1, without_curves, program, [str(miniature(tmp_path, name))], timeout_s=250.0) == [0]
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found][-2:] == [1, 2]  # and step 0, where there is something to evaluate
    assert found[-1]["update/grad_norm"] >= 0
