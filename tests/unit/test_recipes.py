"""Every recipe is a configuration that keeps all rules, and says what it needs, costs, and should reach."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from spmdrl.config import Config, PreferencesConfig, read_config

RECIPES = Path(__file__).parents[2] / "configs/recipes"
HEADS = ("needs", "costs", "expect", "run", "miniature")


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_is_a_configuration_with_its_head(recipe: Path) -> None:
    cfg = read_config(PreferencesConfig if recipe.stem == "dpo" else Config, str(recipe), [])
    assert cfg.run.name == f"recipe-{recipe.stem}" and cfg.model.path.startswith("hf:")
    said = re.findall(r"^# (\w+) {2,}\S", recipe.read_text(), re.M)
    assert tuple(said) == HEADS
    assert f"configs/recipes/{recipe.name}" in recipe.read_text() or recipe.stem == "dapo-17k"


def test_there_are_eight_of_them_and_the_page_has_each() -> None:
    page = (RECIPES.parents[1] / "docs/recipes.md").read_text()
    names = {recipe.stem for recipe in RECIPES.glob("*.toml")}
    assert len(names) == 8 and set(re.findall(r"configs/recipes/([\w-]+)\.toml", page)) == names


@pytest.mark.parametrize(
    ("guess", "word", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("allee", "apple", "GYXXG"),
        ("speed", "erase", "YXYYX"),
        ("solid", "crane", "XXXXX"),
    ],
)
def test_the_game_marks_each_letter_once(guess: str, word: str, expected: str) -> None:
    game = runpy.run_path(str(RECIPES / "wordle.py"))
    assert game["marks"](guess, word) == expected
    played = game["Wordle"]()
    played.reset(3)
    assert played.word in game["WORDS"] and played.step("no idea")[1:] == (0.0, False)
    assert played.step(f"<guess>{played.word.upper()}</guess>") == (None, 1.0, True)
