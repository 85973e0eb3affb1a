"""The configuration reference is complete, and is the one in docs/."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.gen.config_reference import reference, settings
from spmdrl.config import Config, PreferencesConfig, Section, SftConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_page_in_docs_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "docs/configuration.md is out of date: run `make docs`"


@pytest.mark.parametrize("kind", [Config, SftConfig, PreferencesConfig])
def test_every_setting_has_a_description(kind: type[Section]) -> None:
    assert [name for name, field in settings(kind) if not (field.description or "").strip()] == []


@pytest.mark.parametrize("kind", [Config, SftConfig, PreferencesConfig])
def test_every_setting_is_on_the_page(kind: type[Section]) -> None:
    page = reference()
    names = {name.rpartition(".")[2] for name, _ in settings(kind)}
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_settings_reach_into_arrays_of_tables() -> None:
    names = {name for name, _ in settings(Config)}
    assert {"run.name", "data.sources", "data.sources.path", "reward.terms.function", "eval.sources.params"} <= names


def test_values_defaults_and_bounds_are_told_in_words() -> None:
    # Of settings that are called the same, the first.
    rows = {line.split("`")[1]: line for line in reversed(reference().splitlines()) if line.startswith("| `")}
    assert "| text | required |" in rows["opens"]
    assert "| whole number, at least 1 | required |" in rows["group_size"]
    assert "| number, above 0 | required |" in rows["lr"]
    assert "| list of 2: number, at least 0, below 1 | `[0.9, 0.999]` |" in rows["betas"]
    assert '| `"constant"`, `"linear"`, `"cosine"`, `"wsd"` | `"constant"` |' in rows["schedule"]
    assert "| number, above 0, at most 1 | `1.0` |" in rows["top_p"]
