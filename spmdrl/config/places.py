"""The place of each setting: a line of the file, or the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from spmdrl.config.base import Section
from spmdrl.config.names import settings_in


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A place in a configuration; places are ordered as the user reads them, the command line after the file."""

    part: int  # 0: a line of the file; 1: the file, but no line of it; 2: the command line; 3: neither
    number: int = 0  # of the line, or of the override
    prefix: str = field(default="", compare=False)  # of a sentence about something there


@dataclass(frozen=True, slots=True)
class Places:
    """The places of everything that one configuration sets."""

    kind: type[Section]
    path: str
    lines: Mapping[str, int]  # of each table header and key, by dotted name; entries of an array by index
    overrides: Mapping[str, int]  # the number of each override, by dotted name

    def of_setting(self, name: str) -> Place:
        """The place of the setting, or of the innermost table around it that has one."""
        while name:
            if (place := self._own(name)) is not None:
                return place
            name = name.rpartition(".")[0]
        return Place(1, prefix=f"{self.path}: ")

    def of_sentence(self, sentence: str) -> Place:
        """The place of the first setting in a sentence that the user has written, else of the first setting."""
        names = settings_in(self.kind, sentence)
        written = [place for name in names if (place := self._own(name)) is not None]
        if written:
            return written[0]
        return self.of_setting(names[0]) if names else Place(3)

    def _own(self, name: str) -> Place | None:
        """The place of this setting, or of the first thing inside this table; None where there is neither."""
        if name in self.overrides:
            return Place(2, self.overrides[name], "on the command line: ")
        if (line := self.lines.get(name) or _first_inside(name, self.lines)) is not None:
            return Place(0, line, f"{self.path}:{line}: ")
        number = _first_inside(name, self.overrides)
        return None if number is None else Place(2, number, "on the command line: ")


def _first_inside(table: str, places: Mapping[str, int]) -> int | None:
    return min((place for name, place in places.items() if name.startswith(f"{table}.")), default=None)


def key_lines(text: str) -> dict[str, int]:
    """The line of each table header and of each key at the start of a line, by dotted name (array tables by index)."""
    lines: dict[str, int] = {}
    table = ""
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.\-]+)\s*\]", line):
            table = header[2]
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}.{counts[table]}"
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            lines.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return lines
