"""The names of settings: which there are, and which one was meant."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from spmdrl.config.base import Section

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


def is_whole(annotation: Any) -> bool:
    """True for a field that is one setting although it holds tables: a list of them, or a table of several kinds."""
    return is_array(annotation) or len(sections_in(annotation)) > 1


def all_keys(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings and tables."""
    for key, field in kind.model_fields.items():
        yield prefix + key
        for section in sections_in(field.annotation):
            yield from all_keys(section, f"{prefix}{key}.")


def all_tables(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted names of all tables that are not in an array."""
    for key, field in kind.model_fields.items():
        for section in [] if is_array(field.annotation) else sections_in(field.annotation):
            yield prefix + key
            yield from all_tables(section, f"{prefix}{key}.")


def _walk(kind: type[Section], location: Location) -> Iterator[tuple[str | int, bool, list[type[Section]]]]:
    """Yield each part of a location, True where it is a chosen `kind`, and the Section classes that may stand there."""
    sections = [kind]
    is_choice = False  # the next key says which of the sections it is
    for part in location:
        is_tag = is_choice and isinstance(part, str)
        if is_tag:
            sections = [section for section in sections if part in get_args(section.model_fields["kind"].annotation)]
            is_choice = False
        elif isinstance(part, str):
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            sections = [inner for field in fields for inner in sections_in(field.annotation)]
            is_choice = len(sections) > 1 and not any(is_array(field.annotation) for field in fields)
        else:
            is_choice = bool(sections)
        yield part, is_tag, sections


def without_tags(kind: type[Section], location: Location) -> Location:
    """The keys and indices of a location, as the file has them."""
    return tuple(part for part, is_tag, _ in _walk(kind, location) if not is_tag)


def without_types(kind: type[Section], location: Location) -> Location:
    """A location without the names that pydantic gives to types, which follow the setting that has them."""
    around = [kind]
    for place, (part, is_tag, sections) in enumerate(_walk(kind, location)):
        if isinstance(part, str) and not is_tag and not any(part in section.model_fields for section in around):
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
    """The name that an unknown key was probably meant to be: of the same table, else of any."""
    given = str(location[-1])
    if near := difflib.get_close_matches(given, _siblings(kind, location), n=1, cutoff=0.6):
        return ".".join(str(part) for part in (*without_tags(kind, location[:-1]), near[0]))
    # Of settings that are called the same, the first.
    everywhere = {name.rpartition(".")[2]: name for name in reversed([*all_keys(kind)])}
    near = difflib.get_close_matches(given, everywhere, n=1, cutoff=0.8)
    return everywhere[near[0]] if near else None


def did_you_mean(kind: type[Section], location: Location) -> str:
    """A hint for an unknown key."""
    if meant := nearest(kind, location):
        return f"; did you mean {meant}?"
    siblings = _siblings(kind, location)
    return f"; the settings there are {', '.join(siblings)}" if siblings else ""


def _siblings(kind: type[Section], location: Location) -> list[str]:
    return list(dict.fromkeys(key for section in sections_at(kind, location[:-1]) for key in section.model_fields))


def settings_in(kind: type[Section], sentence: str) -> list[str]:
    """The settings that a sentence names, in its order: by their dotted names, or a table as `[table]`.

    After `table: ` it calls the settings of that table by their names there.
    """
    known, tables = set(all_keys(kind)), set(all_tables(kind))
    table, colon, _ = sentence.partition(": ")
    prefix = f"{table}." if colon and table in tables else ""
    spoken = re.sub(r'"[^"]*"', '""', sentence)  # values may be spelled like names
    found = [table] if prefix else []
    for bracket, word in re.findall(r"(?<![\w./-])(\[?)(\w++(?:\.\w++)*+)(?![\w/])", spoken):
        name = prefix + word if prefix + word in known else word
        # Without brackets or a dot, the name of a table is a word like others: data, model, run.
        if name in known and (bracket or "." in word or name not in tables):
            found.append(name)
    return found[1:] + found[:1] if prefix else found
