"""docs/coming-from.md names settings that exist: ours, and those of the peers that are installed."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from docs.gen.config_reference import settings
from spmdrl.config import Config, PreferencesConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")
OURS: dict[str, list[FieldInfo]] = {}
for _kind in (Config, PreferencesConfig):
    for _name, _field in settings(_kind):
        OURS.setdefault(_name, []).append(_field)
TABLES = {*Config.model_fields, *PreferencesConfig.model_fields} - set(OURS)


def rows(peer: str) -> list[list[str]]:
    """The cells of a peer's table."""
    section = PAGE.split(f"\n## {peer}\n")[1].split("\n## ")[0]
    return [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]


def names(peer: str) -> list[str]:
    """The peer's settings that its table names, without values."""
    return [name.partition("=")[0] for row in rows(peer) for name in CODE.findall(row[0])]


def is_right(code: str) -> bool:
    """True for a setting of ours, and for one with a value that it may have."""
    name, _, value = code.partition(" = ")
    if name not in OURS:
        return any(known.startswith(f"{name}.") for known in OURS) and not value
    if not value:
        return True
    found = tomllib.loads(f"value = {value}")["value"]
    return any(_takes(field, found) for field in OURS[name])


def _takes(field: FieldInfo, value: Any) -> bool:
    try:
        TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
    except ValueError:
        return False
    return True


def test_our_settings_exist_and_can_have_these_values() -> None:
    ours = {
        code
        for line in PAGE.splitlines()
        if line.startswith("|")
        for cell in (line.strip("|").split(" | ")[1:] if line.startswith("| `") else [line])
        for code in CODE.findall(cell)
        if code.partition(".")[0] in TABLES or code.startswith("true_on_policy")
    }
    assert len(ours) > 100
    assert {code for code in ours if not is_right(code)} == set()


def test_every_row_names_ours_or_says_why_there_is_none() -> None:
    for peer in ("TRL", "verl", "miles", "prime-rl"):
        for row in rows(peer):
            assert any(is_right(code) for code in CODE.findall(row[1])) or len(row[1].split()) > 1, row


def packages(venv: str) -> Path:
    found = sorted((ROOT / venv).glob("lib/python*/site-packages"))
    if not found:
        pytest.skip(f"there is no {venv}; `bash benchmarks/run.sh` makes it")
    return found[0]


def test_the_names_of_trl_are_fields_of_its_configuration() -> None:
    folder = packages(".venv-trl")
    trainers = (f"trl/trainer/{name}_config.py" for name in ("grpo", "dpo", "reward", "distillation", "base"))
    files = (*trainers, "transformers/training_args.py")
    fields = {
        node.target.id
        for file in files
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert set(names("TRL")) - fields == set()


def test_the_names_of_verl_are_settings_of_its_trainer() -> None:
    yaml = pytest.importorskip("yaml")
    folder = packages(".venv-verl") / "verl/trainer/config"
    whole = yaml.safe_load((folder / "_generated_ppo_trainer.yaml").read_text(encoding="utf-8"))
    known = set(_dotted(whole)) | set(_dotted(whole["actor_rollout_ref"]))
    assert set(names("verl")) - known == set()


def _dotted(tree: Any, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return []
    return [name for key, value in tree.items() for name in (f"{prefix}{key}", *_dotted(value, f"{prefix}{key}."))]
