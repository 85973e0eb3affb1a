"""The recipes of launch/ keep what docs/containers.md promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPES = ["Dockerfile", "Dockerfile.cpu"]


def instructions(recipe: str) -> list[tuple[str, str]]:
    """The instructions of a recipe, each as its word and the rest."""
    text = re.sub(r"^#.*\n", "", (ROOT / "launch" / recipe).read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_copied_is_there_and_is_enough_to_install(recipe: str) -> None:
    copied = [name for word, rest in instructions(recipe) if word == "COPY" for name in rest.split()[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'"(README\.md|LICENSE)"', project)
    assert {*named, "pyproject.toml", "Makefile", "constraints", "spmdrl", "spmdrl_sglang_cpu"} <= set(copied)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_ends_as_a_user_that_is_not_root_and_offline(recipe: str) -> None:
    found = instructions(recipe)
    words = [word for word, _ in found]
    assert [rest for word, rest in found if word == "USER"] == ["10001"]
    assert "RUN" not in words[words.index("USER") :]  # nothing is installed as that user
    assert any(word == "ENV" and "HF_HUB_OFFLINE=1" in rest for word, rest in found)


@pytest.mark.parametrize(("recipe", "torch"), [("Dockerfile", "cuda"), ("Dockerfile.cpu", "cpu")])
def test_it_installs_the_pinned_versions(recipe: str, torch: str) -> None:
    """By a target of the Makefile, which hands the constraints to every install; pip is called nowhere else."""
    commands = [rest for word, rest in instructions(recipe) if word == "RUN"]
    (install,) = [command for command in commands if re.search(rf"\bmake setup(-sglang)? TORCH={torch}\b", command)]
    assert not any(re.search(r"\bpip\b", command) for command in commands if command != install)


def test_the_base_for_gpus_is_named_by_digest() -> None:
    (base,) = [rest for word, rest in instructions("Dockerfile") if word == "FROM"]
    assert re.fullmatch(r"nvidia/cuda:13\.0\.\d-devel-ubuntu24\.04@sha256:[0-9a-f]{64}", base)
