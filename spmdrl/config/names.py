"""The names of settings: which there are, and which one was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from spmdrl.config.base import Section


def parts(location: tuple[str | int, ...]) -> Iterator[tuple[str | int, bool]]:
    """(part, whether it is a tag): after a list index pydantic names the chosen `kind`, which is no key of the file."""
    for before, part in zip((None, *location), location, strict=False):
        yield part, isinstance(before, int) and isinstance(part, str)


def did_you_mean(kind: type[Section], location: tuple[str | int, ...]) -> str:
    """A hint for an unknown key: the nearest key of the same table, else of any table."""
    siblings = keys_of(sections_at(kind, location[:-1]))
    prefix = "".join(f"{part}." for part, is_tag in parts(location[:-1]) if not is_tag)
    given = str(location[-1])
    if near := difflib.get_close_matches(given, siblings, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{near[0]}?"
    # Of settings that are called the same, the first.
    everywhere = {name.rpartition(".")[2]: name for name in reversed([*all_keys(kind)])}
    if near := difflib.get_close_matches(given, everywhere, n=1, cutoff=0.8):
        return f"; did you mean {everywhere[near[0]]}?"
    return f"; the settings there are {', '.join(siblings)}" if siblings else ""


def sections_in(annotation: Any) -> list[type[Section]]:
    """The Section classes inside an annotation such as `Section | None` or `tuple[A | B, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) is not None:
        return [section for part in get_args(annotation) for section in sections_in(part)]
    return []


def sections_at(kind: type[Section], location: tuple[str | int, ...]) -> list[type[Section]]:
    """The Section classes that may stand at a pydantic location."""
    sections = [kind]
    for part, is_tag in parts(location):
        if is_tag:
            sections = [section for section in sections if part in get_args(section.model_fields["kind"].annotation)]
        elif isinstance(part, str):
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            sections = [inner for field in fields for inner in sections_in(field.annotation)]
    return sections


def keys_of(sections: list[type[Section]]) -> list[str]:
    return list(dict.fromkeys(key for section in sections for key in section.model_fields))


def tags_at(kind: type[Section], location: tuple[str | int, ...]) -> list[str]:
    return [
        f'"{tag}"'
        for section in sections_at(kind, location)
        for tag in get_args(section.model_fields["kind"].annotation)
    ]


def all_keys(kind: type[Section], prefix: str = "") -> Iterator[str]:
    for key, field in kind.model_fields.items():
        yield prefix + key
        for section in sections_in(field.annotation):
            yield from all_keys(section, f"{prefix}{key}.")
