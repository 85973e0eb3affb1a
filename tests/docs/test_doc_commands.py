"""Every command in the documentation runs as it is printed, or the page says why not (helpers/doc_commands.py)."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.doc_commands import NEEDS, Block, blocks, files, programs
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import write_config

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCKS = [block for page in PAGES for block in blocks(page)]
IN_PLACE = ("configs", "launch", "benchmarks", "constraints")
LIMIT_S = 900.0  # of one command; a test that is not slow has pytest's limit
USAGE = re.compile(r" \[[^]]*\]")  # what a usage line leaves to the reader


def pages(*, slow: bool) -> list[Path]:
    """The pages with blocks that are run, and those of them with slow ones."""
    return [page for page in PAGES if any(b.page == page and b.is_run and ("slow" in b.marks) >= slow for b in BLOCKS)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in which the pages' commands find what they name: CONFIG.toml, mine.toml, and a tiny model."""
    for name in IN_PLACE:
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("runs/tiny", "runs/demo-sft/hf"):
        save_tiny_model(tmp_path / name, hidden_size=32, num_layers=1)
    for name, run in (("CONFIG.toml", "NAME"), ("mine.toml", "mine")):
        write_config(
            tmp_path,
            name=name,
            run={"name": run, "dir": "runs"},
            model={"path": "runs/tiny"},
            eval=None,  # nobody could answer it where a page trains on recorded rollouts
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    if "needs" in block.marks:
        assert block.marks["needs"] in NEEDS
    elif "run by" in block.marks:
        text = (ROOT / block.marks["run by"]).read_text(encoding="utf-8")
        missing = {name for command in block.commands for name in programs(command) if not is_in(name, text)}
        assert missing == set()


def is_in(program: str, text: str) -> bool:
    """True when a test or script runs the program, in one of the ways in which they do."""
    if program.startswith("make "):
        return program != "make demo" or "launch/demo.sh" in text
    package, _, module = program.rpartition(".")
    names = [re.escape(program), *([rf"{re.escape(package)} import .*\b{module}\b"] if package else [])]
    return any(re.search(name, text) for name in names)


def test_every_target_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    inline = {name for page in PAGES for name in re.findall(r"`make ([a-z0-9-]+)", page.read_text(encoding="utf-8"))}
    shown = {name for block in BLOCKS for command in block.commands for name in programs(command)}
    assert inline | {name.removeprefix("make ") for name in shown if name.startswith("make ")} <= targets


@pytest.mark.parametrize("page", pages(slow=False), ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, folder: Path) -> None:
    run_page(page, folder, [block for block in blocks(page) if block.is_run and "slow" not in block.marks])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", pages(slow=True), ids=lambda page: page.name)
def test_the_slow_commands_of_a_page_run(page: Path, folder: Path) -> None:
    chosen = [block for block in blocks(page) if block.is_run]
    if any("tools.tiny_model runs/tiny" in command for block in chosen for command in block.commands):
        shutil.rmtree(folder / "runs/tiny")  # the page makes its own
    run_page(page, folder, chosen)


def run_page(page: Path, folder: Path, chosen: Sequence[Block]) -> None:
    """Write the files that the page shows, then run the commands of these blocks in their order."""
    for name, text in files(page).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    for block in chosen:
        for command in block.commands:
            code, printed = run(USAGE.sub("", command))
            assert code == int(block.marks.get("exits", 0)), f"{block}: {command}: exit code {code}\n{printed}"


def run(command: str) -> tuple[int, str]:
    """Run a command line here; return its exit code and what it printed."""
    words = shlex.split(command)
    if words[0] == "spmdrl":
        words = ["python", "-m", "spmdrl.tools.command", *words[1:]]
    if words[:2] == ["python", "-m"] and not set(command) & set("|<>;&$*"):
        (code,) = run_ranks(1, in_this_process, words[2], words[3:], timeout_s=LIMIT_S)  # without seconds of imports
        return code, Path("printed").read_text(encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NPROC": "2"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def in_this_process(module: str, arguments: list[str]) -> int:
    """Run a module as `python -m` does, with its output in the file `printed`; return its exit code."""
    sys.argv = [module, *arguments]
    sys.path.insert(0, "")
    with (
        open("printed", "w", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0
