"""The commands that a page shows, and what the page says of running them.

A block of commands is run by tests/docs/test_doc_commands.py as it is printed, unless an HTML comment before it says

    <!-- slow -->             it takes minutes: the same test runs it, marked slow
    <!-- exits: 2 -->         it ends with another exit code than 0
    <!-- needs: a GPU -->     what nobody has who runs the tests: a GPU, SLURM, docker, a network
    <!-- run by: FILE -->     a test or script that does the same, with arguments of its own
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spmdrl.tools.command import PROGRAMS

NEEDS = ("GPU", "SLURM", "docker", "network")
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S* )*(?:"
    r"make|python3?|torchrun|torchx|sky|pip|pytest|spmdrl|sbatch|srun|scancel|docker|git|hf|bash|sh|source|cp|mv|rm|mkdir|touch|cat|cd|head|tail|ls|grep"
    r"|echo|export|tensorboard|for|tar|nvidia-smi|(?:/opt/spmdrl/)?launch/[\w.]+|benchmarks/[\w.]+)(?: (?!=)|$)"
)
MARK = re.compile(r"^<!-- (slow|exits|needs|run by)(?:: (.+?))? -->$")
FILE = re.compile(r'^```\w+ title="([^"]+)"$')


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring commands of a page."""

    page: Path
    line: int  # of the first command, from 1
    commands: tuple[str, ...]  # whole, without `$ ` and without comments at their ends
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def is_run(self) -> bool:
        """True when the test of the pages runs it."""
        return not self.marks.keys() & {"needs", "run by"}

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that have commands, in their order."""
    found = []
    for line, marks, text in _code(page.read_text(encoding="utf-8").splitlines()):
        if commands := tuple(_commands(text)):
            found.append(Block(page, line, commands, marks))
    return found


def files(page: Path) -> dict[str, str]:
    """The files that a page shows in full: code with a title."""
    lines = page.read_text(encoding="utf-8").splitlines()
    shown = {}
    for number, line in enumerate(lines):
        if title := FILE.match(line):
            end = lines.index("```", number)
            shown[title[1]] = "\n".join(lines[number + 1 : end]) + "\n"
    return shown


def _code(lines: list[str]) -> Iterator[tuple[int, dict[str, str], list[str]]]:
    """Yield each block of code that may have commands, with the number of its first line and the marks before it."""
    marks: dict[str, str] = {}
    number = 0
    while number < len(lines):
        line, before = lines[number], lines[number - 1] if number else ""
        if mark := MARK.match(line):
            marks[mark[1]] = mark[2] or ""
        elif line.startswith("```"):
            end = lines.index("```", number + 1)
            if line in ("```", "```sh", "```console"):
                yield number + 2, marks, lines[number + 1 : end]
            marks, number = {}, end
        elif line.startswith("    ") and not before.strip():
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield number + 1, marks, [text[4:] for text in lines[number:end]]
            marks, number = {}, end - 1
        elif line.strip():
            marks = {}
        number += 1


def _commands(text: list[str]) -> Iterator[str]:
    """Yield the commands of a block; where some have a prompt, `$ `, the other lines are what they print."""
    whole = "\n".join(text).replace("\\\n", " ").splitlines()
    has_prompts = any(line.startswith("$ ") for line in whole)
    for line in whole:
        if has_prompts and not line.startswith("$ "):
            continue
        command = line.removeprefix("$ ")
        if PROGRAM.match(command):
            yield re.sub(r"\s{2,}", " ", _without_comment(command)).strip()


def _without_comment(command: str) -> str:
    return re.split(r"\s+#\s", command, maxsplit=1)[0]


def programs(command: str) -> set[str]:
    """Return the programs of a command by the names in a test of it: modules of spmdrl, scripts, targets of make."""
    words = shlex.split(command)
    found = {word for word in words if re.fullmatch(r"(?:launch|benchmarks)/[\w.]+", word)}
    found |= {
        words[place + 1] for place, word in enumerate(words) if word == "-m" and words[place + 1] != "http.server"
    }
    if words[0] == "spmdrl" and PROGRAMS[words[1]].function != "main":
        found.add(f"runs.{words[1]}")
    if words[0] == "make":
        found.add(f"make {next(word for word in words[1:] if '=' not in word)}")
    return found
