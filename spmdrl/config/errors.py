"""Errors in a configuration: the setting that was meant, its line in the file, and a sentence about what is wrong."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError

from spmdrl.config.base import Section
from spmdrl.config.strict import shown

# The names of settings: which there are, and which one was meant.


Location = tuple[str | int, ...]  # pydantic's: keys, indices of lists, and before a table of several kinds its `kind`


def sections_in(annotation: Any) -> list[type[Section]]:
    """The Section classes inside an annotation such as `Section | None` or `tuple[A | B, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections_in(part)]


def is_array(annotation: Any) -> bool:
    """True for a field that holds a list of tables."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(is_array(part) for part in get_args(annotation))
    return get_origin(annotation) is tuple and bool(sections_in(annotation))


def is_by_name(annotation: Any) -> bool:
    """True for a field that holds tables whose names the user chooses, such as [models.NAME]."""
    return get_origin(annotation) is dict and bool(sections_in(annotation))


def is_whole(annotation: Any) -> bool:
    """True for a field that is one setting although it holds tables: several of them, or a table of several kinds."""
    return is_array(annotation) or is_by_name(annotation) or len(sections_in(annotation)) > 1


def all_keys(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings and tables."""
    for key, info in kind.model_fields.items():
        yield prefix + key
        for section in sections_in(info.annotation):
            yield from all_keys(section, f"{prefix}{key}.")


def all_tables(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted names of all tables that are not in an array, and whose names are ours."""
    for key, info in kind.model_fields.items():
        is_one = not is_array(info.annotation) and not is_by_name(info.annotation)
        for section in sections_in(info.annotation) if is_one else []:
            yield prefix + key
            yield from all_tables(section, f"{prefix}{key}.")


def _walk(kind: type[Section], location: Location) -> Iterator[tuple[str | int, bool, list[type[Section]]]]:
    """Yield each part of a location, True where it is a chosen `kind`, and the Section classes that may stand there."""
    sections = [kind]
    is_choice = False  # the next key says which of the sections it is
    is_name = False  # the next key is a name that the user chose
    for part in location:
        is_tag = is_choice and isinstance(part, str)
        if is_name:
            is_name = False
        elif is_tag:
            sections = [section for section in sections if part in get_args(section.model_fields["kind"].annotation)]
            is_choice = False
        elif isinstance(part, str):
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            sections = [inner for field in fields for inner in sections_in(field.annotation)]
            is_choice = len(sections) > 1 and not any(is_array(field.annotation) for field in fields)
            is_name = any(is_by_name(field.annotation) for field in fields)
        else:
            is_choice = len(sections) > 1
        yield part, is_tag, sections


def without_tags(kind: type[Section], location: Location) -> Location:
    """The keys and indices of a location, as the file has them."""
    return tuple(part for part, is_tag, _ in _walk(kind, location) if not is_tag)


def without_types(kind: type[Section], location: Location) -> Location:
    """A location without the names that pydantic gives to types, which follow the setting that has them."""
    around = [kind]
    for place, (part, is_tag, sections) in enumerate(_walk(kind, location)):
        is_known = any(part in section.model_fields for section in around) or (around and sections == around)
        if isinstance(part, str) and not is_tag and not is_known:
            return location[:place]
        around = sections
    return location


def sections_at(kind: type[Section], location: Location) -> list[type[Section]]:
    """The Section classes that may stand at a location."""
    *_, (_, _, sections) = [("", False, [kind]), *_walk(kind, location)]
    return sections


def setting_at(kind: type[Section], location: Location) -> str:
    """The dotted name of the setting or table that a location is, or that it lies in; "" for an unknown key.

    An array of tables is one setting, and so is a table of several kinds.
    """
    names: list[str] = []
    section = kind
    for part in location:
        if part not in section.model_fields:
            return ""
        annotation = section.model_fields[str(part)].annotation
        names.append(str(part))
        if is_whole(annotation) or not sections_in(annotation):
            break
        (section,) = sections_in(annotation)
    return ".".join(names)


def tags_at(kind: type[Section], location: Location) -> list[str]:
    """The values of `kind` that tables at a location may have, as TOML."""
    sections = sections_at(kind, location)
    return [f'"{tag}"' for section in sections for tag in get_args(section.model_fields["kind"].annotation)]


def nearest(kind: type[Section], location: Location) -> str | None:
    """The name that an unknown key was probably meant to be: of a table inside, of the same table, else of any."""
    given, table = str(location[-1]), without_tags(kind, location[:-1])
    for name in all_keys(kind) if table else ():
        if name.startswith(".".join(map(str, table)) + ".") and name.rpartition(".")[2] == given:
            return name  # of a table in that table
    if near := difflib.get_close_matches(given, _siblings(kind, location), n=1, cutoff=0.6):
        return ".".join(str(part) for part in (*table, near[0]))
    # Of settings that are called the same, the first.
    everywhere = {name.rpartition(".")[2]: name for name in reversed([*all_keys(kind)])}
    near = difflib.get_close_matches(given, everywhere, n=1, cutoff=0.8)
    return everywhere[near[0]] if near else None


# Settings that were there, by their names without places in arrays, with the end of their sentence.
_REPLACED = {
    "distill.teachers.rewarded": '; for rewarded = false, set advantage.estimator = "none" in the '
    "[data.sources.algorithm] of the sources that it teaches",
}


def did_you_mean(kind: type[Section], location: Location) -> str:
    """A hint for an unknown key."""
    if meant := nearest(kind, location):
        return f"; did you mean {meant}?"
    siblings = _siblings(kind, location)
    return f"; the settings there are {', '.join(siblings)}" if siblings else ""


def _siblings(kind: type[Section], location: Location) -> list[str]:
    return list(dict.fromkeys(key for section in sections_at(kind, location[:-1]) for key in section.model_fields))


_INDEX = re.compile(r"\.\d+(?=\.)")  # of an entry of an array of tables


def settings_in(kind: type[Section], sentence: str) -> list[str]:
    """The settings that a sentence names, in its order: by their dotted names, or a table as `[table]`.

    After `table: ` it calls the settings of that table by their names there.
    """
    known, tables = set(all_keys(kind)), set(all_tables(kind))
    by_name = {key for key, info in kind.model_fields.items() if is_by_name(info.annotation)}
    table, colon, _ = sentence.partition(": ")
    prefix = f"{table}." if colon and table in tables else ""
    spoken = re.sub(r'"[^"]*"', '""', sentence)  # values may be spelled like names
    found = [table] if prefix else []
    for bracket, word in re.findall(r"(?<![\w./-])(\[?)(\w++(?:\.\w++)*+)(?![\w/])", spoken):
        name = prefix + word if prefix + word in known else word
        if _INDEX.search(word):  # in an array of tables: the setting, or the table that it is in
            parts = _INDEX.sub("", word).split(".")
            name = next((inner for end in range(len(parts), 1, -1) if (inner := ".".join(parts[:end])) in known), word)
        # Without brackets or a dot, the name of a table is a word like others: data, model, run.
        is_ours = name in known and (bracket or "." in word or name not in tables)
        if is_ours or ("." in name and name.partition(".")[0] in by_name):
            found.append(name)
    return found[1:] + found[:1] if prefix else found


# The place of each setting: a line of the file, or the command line.


@dataclass(frozen=True, slots=True, order=True)
class SourceLocation:
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

    def of_setting(self, name: str) -> SourceLocation:
        """The place of the setting, or of the innermost table around it that has one."""
        while name:
            if (place := self._own(name)) is not None:
                return place
            name = name.rpartition(".")[0]
        return SourceLocation(1, prefix=f"{self.path}: ")

    def of_sentence(self, sentence: str) -> SourceLocation:
        """The place of the first setting in a sentence that the user has written, else of the first setting."""
        if (first := re.match(r"[\w.]+", sentence)) and _INDEX.search(first[0]):
            return self.of_setting(first[0])
        names = settings_in(self.kind, sentence)
        written = [place for name in names if (place := self._own(name)) is not None]
        if written:
            return written[0]
        return self.of_setting(names[0]) if names else SourceLocation(3)

    def _own(self, name: str) -> SourceLocation | None:
        """The place of this setting, or of the first thing inside this table; None where there is neither."""
        if name in self.overrides:
            return SourceLocation(2, self.overrides[name], "on the command line: ")
        if (line := self.lines.get(name) or _first_inside(name, self.lines)) is not None:
            return SourceLocation(0, line, f"{self.path}:{line}: ")
        number = _first_inside(name, self.overrides)
        return None if number is None else SourceLocation(2, number, "on the command line: ")


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
            elif around := next((one for one in counts if table.startswith(f"{one}.")), None):
                table = f"{around}.{counts[around]}{table.removeprefix(around)}"  # a table in the last of these
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            lines.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return lines


# From what pydantic says about fields to sentences, and to the settings that have no value for it.


@dataclass(frozen=True, slots=True)
class ConfigError:
    """A field that is not in order."""

    name: str  # dotted, as the user wrote it
    sentence: str
    missing: str = ""  # the setting that has no value for it


def field_mistakes(kind: type[Section], values: Mapping[str, Any], error: ValidationError) -> Iterator[ConfigError]:
    """Yield each mistake that pydantic found in the `values` of a file."""
    refused: dict[str, tuple[Any, list[str]]] = {}  # a choice of types refuses a value once for each of them
    errors = error.errors(include_url=False)
    misspelled = {nearest(kind, one["loc"]) for one in errors if one["type"] == "extra_forbidden"}
    for problem in errors:
        location = problem["loc"]
        name = ".".join(map(str, without_tags(kind, location)))
        setting = setting_at(kind, location)
        match problem["type"]:
            case "extra_forbidden":
                missing = _meant(kind, location, values)
                hint = _REPLACED.get(_INDEX.sub("", name)) or did_you_mean(kind, location)
                yield ConfigError(name, f"{name}: no such setting{hint}", missing)
            case "missing" if name in misspelled:
                pass  # its sentence is that of the misspelled key
            case "missing":
                yield ConfigError(name, f"{name}: required, not set", setting)
            case "value_error":
                yield ConfigError(name, f"{name} = {_toml_like(problem['input'])} {problem['ctx']['error']}", setting)
            case "too_short" if problem["input"]:
                pass  # its entries are wrong, and have sentences of their own
            case "too_short" if without_types(kind, location) == location:
                yield ConfigError(name, f"{name} is empty; it needs at least one entry", setting)
            case "model_type" | "model_attributes_type" | "dict_type":
                yield ConfigError(
                    name, f"{name} = {_toml_like(problem['input'])}: must be a table of settings", setting
                )
            case "union_tag_not_found" | "union_tag_invalid":
                known = ", ".join(tags_at(kind, location))
                yield ConfigError(name, f"{name}.kind: must be one of {known}", setting)
            case _:
                name = ".".join(map(str, without_tags(kind, without_types(kind, location))))
                message = (problem["msg"][0].lower() + problem["msg"][1:]).replace("tuple", "list")
                refused.setdefault(name, (problem["input"], []))[1].append(message)
    for name, (value, messages) in refused.items():
        setting = setting_at(kind, tuple(name.split(".")))
        yield ConfigError(name, f"{name} = {_toml_like(value)}: {' or '.join(messages)}", setting)


def _meant(kind: type[Section], location: Location, values: Mapping[str, Any]) -> str:
    """The setting that an unknown key would have set, as far as that is known; "" where it is set in any case."""
    around = setting_at(kind, location[:-1])
    if around != ".".join(map(str, location[:-1])):
        return around  # an array of tables, which is known as a whole or not at all
    meant = nearest(kind, location) or ""
    table: Any = values
    for key in meant.split("."):
        if not isinstance(table, Mapping) or key not in table:
            return meant
        table = table[key]
    return ""


def _toml_like(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):  # Python refuses to write thousands of digits
        return shown(str(value) if value.bit_length() < 64 else f"{value:#x}")
    return shown(f'"{value}"' if isinstance(value, str) else str(value))
