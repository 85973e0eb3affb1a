"""Links, commands and paths in the documentation point at things that exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

from tests.helpers.pages import is_broken, prose

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^]]*]\(([^)\s]+)\)")
COMMAND = re.compile(r"-m (spmdrl(?:\.[a-z_]+)*)")
PATH = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|toml|sh|sbatch))`")
MENTION = re.compile(r"\bdocs/[\w-]+\.md(?:#[\w-]+)?")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    links = [link for link in LINK.findall(prose(page)) if "://" not in link]
    assert [link for link in links if is_broken(link, page)] == []


@every_page
def test_commands_name_modules(page: Path) -> None:
    modules = set(COMMAND.findall(page.read_text(encoding="utf-8")))
    assert {module for module in modules if importlib.util.find_spec(module) is None} == set()


@every_page
def test_paths_name_files_of_the_repository_or_of_the_package(page: Path) -> None:
    paths = set(PATH.findall(prose(page)))
    assert {path for path in paths if not ((ROOT / path).exists() or (ROOT / "spmdrl" / path).exists())} == set()


def test_the_package_names_pages_and_headings_that_exist() -> None:
    """In docstrings, comments, messages and scripts, as `docs/page.md` or `docs/page.md#heading`."""
    sources = [
        path
        for folder in ("spmdrl", "launch", "configs", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".toml", ".sh", ".sbatch")
    ]
    named = {(mention, source) for source in sources for mention in MENTION.findall(source.read_text(encoding="utf-8"))}
    broken = [(mention, source.name) for mention, source in named if is_broken(mention, ROOT / "README.md")]
    assert named and broken == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {link.partition("#")[0] for link in LINK.findall(prose(index))}
    assert {page.name for page in index.parent.glob("*.md")} - linked - {index.name} == set()


def test_the_readme_shows_the_loop_as_it_is() -> None:
    source = (ROOT / "spmdrl/train.py").read_text(encoding="utf-8")
    (loop,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)]
    lines = source.splitlines()[loop.lineno - 1 : loop.end_lineno]
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- loop -->\n```python\n")[1].split("```")[0]
    assert shown == textwrap.dedent("\n".join(lines)) + "\n"


DECISION = re.compile(r"^\*\*[^*]+\*\*(?:\s\(`([^`]+)`\))?", re.MULTILINE)


def defined_by(statement: ast.stmt) -> list[str]:
    """Name what a statement defines: a class, a function, or variables."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [getattr(statement, "name", ""), *(target.id for target in targets if isinstance(target, ast.Name))]


def is_there(subject: str) -> bool:
    """True for `file.py:name` or `file.py:Class.name` where a file of the repository or the package defines it."""
    name, _, symbols = subject.partition(":")
    path = next((path for path in (ROOT / name, ROOT / "spmdrl" / name) if path.is_file()), None)
    body = ast.parse(path.read_text(encoding="utf-8")).body if path and symbols else []
    for symbol in symbols.split("."):
        body = next((getattr(node, "body", [node]) for node in body if symbol in defined_by(node)), [])
    return bool(body)


SYMBOL = re.compile(r"`((?:[\w-]+/)+[\w-]+\.py:[\w.]+)`")


def test_the_page_for_contributors_names_symbols_that_exist() -> None:
    named = SYMBOL.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) >= 5 and [name for name in named if not is_there(name)] == []


def test_each_decision_is_about_one_thing_that_exists_and_no_two_are_about_one() -> None:
    subjects = DECISION.findall((ROOT / "docs/decisions.md").read_text(encoding="utf-8"))
    assert [subject for subject in subjects if not is_there(subject)] == []
    assert len(set(subjects)) == len(subjects) > 50
    assert not is_there("model/load.py:no_such_name") and not is_there("no_such_file.py:f") and not is_there("")
    assert is_there("families.py:FAMILIES") and not is_there("families.py:FAMILIES.llama")
    assert is_there("model/load.py:load_policy") and not is_there("model/load.py") and not is_there("model/load.py:")
