"""From what pydantic says about fields to sentences, and to the settings that have no value for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from spmdrl.config.base import Section
from spmdrl.config.names import Location, did_you_mean, nearest, setting_at, tags_at, without_tags, without_types
from spmdrl.config.strict import shown


@dataclass(frozen=True, slots=True)
class Mistake:
    """A field that is not in order."""

    name: str  # dotted, as the user wrote it
    sentence: str
    missing: str = ""  # the setting that has no value for it


def field_mistakes(kind: type[Section], values: Mapping[str, Any], error: ValidationError) -> Iterator[Mistake]:
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
                yield Mistake(name, f"{name}: no such setting{did_you_mean(kind, location)}", missing)
            case "missing" if name in misspelled:
                pass  # its sentence is that of the misspelled key
            case "missing":
                yield Mistake(name, f"{name}: required, not set", setting)
            case "value_error":
                yield Mistake(name, f"{name} = {_toml_like(problem['input'])} {problem['ctx']['error']}", setting)
            case "too_short" if problem["input"]:
                pass  # its entries are wrong, and have sentences of their own
            case "too_short" if without_types(kind, location) == location:
                yield Mistake(name, f"{name} is empty; it needs at least one entry", setting)
            case "model_type" | "model_attributes_type" | "dict_type":
                yield Mistake(name, f"{name} = {_toml_like(problem['input'])}: must be a table of settings", setting)
            case "union_tag_not_found" | "union_tag_invalid":
                known = ", ".join(tags_at(kind, location))
                yield Mistake(name, f"{name}.kind: must be one of {known}", setting)
            case _:
                name = ".".join(map(str, without_tags(kind, without_types(kind, location))))
                message = (problem["msg"][0].lower() + problem["msg"][1:]).replace("tuple", "list")
                refused.setdefault(name, (problem["input"], []))[1].append(message)
    for name, (value, messages) in refused.items():
        setting = setting_at(kind, tuple(name.split(".")))
        yield Mistake(name, f"{name} = {_toml_like(value)}: {' or '.join(messages)}", setting)


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
