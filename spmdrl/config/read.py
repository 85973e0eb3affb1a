"""From a TOML file and overrides to a configuration, or to a sentence for everything that is wrong."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from spmdrl.config.base import Section, SectionT
from spmdrl.config.names import did_you_mean, parts, tags_at
from spmdrl.config.whole import Config, SftConfig
from spmdrl.types import UserError


def read_run_config(path: str, overrides: Sequence[str]) -> Config | SftConfig:
    """Read the configuration of a run of either kind: the one with [rollout] is of `spmdrl.train`, the one with [sft]
    of `spmdrl.sft`. Raises UserError as `read_config` does, and when the file has both tables or neither."""
    named = {override.partition("=")[0].strip().partition(".")[0] for override in overrides}
    tables = named | _parse(path, _read_text(path)).keys()
    if ("rollout" in tables) == ("sft" in tables):
        has = "both [rollout] and [sft]" if "sft" in tables else "neither [rollout] nor [sft]"
        raise UserError(
            f"{path} has {has}, so that it is not clear which program it is for; [rollout] belongs to a run of "
            "spmdrl.train, [sft] to one of spmdrl.sft: have one of them"
        )
    return read_config(SftConfig, path, overrides) if "sft" in tables else read_config(Config, path, overrides)


def read_config(kind: type[SectionT], path: str, overrides: Sequence[str]) -> SectionT:
    """Read a TOML file and `key.sub=value` overrides into `kind`.

    Override values are TOML; what is not TOML is taken as a string. Raises UserError with every problem found, each
    with its file and line where it has one.
    """
    text = _read_text(path)
    values = _parse(path, text)
    lines = _key_lines(text)
    overridden: set[str] = set()
    problems = [problem for override in overrides for problem in _override(values, override, overridden)]

    def where(location: tuple[str | int, ...]) -> str:
        # The innermost table or key that has a line of its own; an override has none.
        for end in range(len(location), 0, -1):
            key = ".".join(str(part) for part in location[:end])
            if key in overridden:
                return "on the command line: "
            if key in lines:
                return f"{path}:{lines[key]}: "
            if any(name.startswith(f"{key}.") for name in overridden):
                return "on the command line: "
        return f"{path}: "

    problems += [where(location) + sentence for location, sentence in _beyond_toml(values)]
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        problems += [where(location) + sentence for location, sentence in _sentences(kind, error)]
    if problems:
        raise UserError("\n".join(problems))
    return config


def _read_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the configuration {path}: {reason}") from error
    if text.startswith("\ufeff"):
        raise UserError(f"{path} begins with a byte order mark, which TOML does not know; save it as UTF-8 without one")
    return text


def _parse(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path} is not valid TOML: lists or tables are nested too deeply") from error


def _beyond_toml(value: Any, location: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What Python's reader of TOML and overrides let pass: whole numbers of more than 64 bits, NUL in text."""
    name = ".".join(map(str, location))
    match value:
        case dict() | list():
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in entries:
                yield from _beyond_toml(inner, (*location, key))
        case int() if not -(2**63) <= value < 2**63:
            yield location, f"{name}: whole numbers have 64 bits, and this one needs {value.bit_length() + 1}"
        case str() if "\0" in value:
            yield location, f"{name}: text must not hold the character NUL"


def _override(values: dict[str, Any], override: str, overridden: set[str]) -> Iterator[str]:
    """Set one `a.b.c=value` in `values`; yields what is wrong with it."""
    dotted, equals, written = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        yield f"{override!r} on the command line is not of the form section.key=value"
        return
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = written
    except RecursionError:
        yield f"{dotted} on the command line is nested too deeply"
        return
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            yield f"{dotted}: {key} is a value, not a table of settings"
            return
    table[keys[-1]] = value
    overridden.add(dotted.strip())


def _key_lines(text: str) -> dict[str, int]:
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


def _sentences(kind: type[Section], error: ValidationError) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Each problem that pydantic found, as (place in the file, sentence)."""
    for problem in error.errors(include_url=False):
        location = tuple(part for part, is_tag in parts(problem["loc"]) if not is_tag)
        name = ".".join(str(part) for part in location)
        match problem["type"]:
            case "extra_forbidden":
                yield location, f"{name}: no such setting{did_you_mean(kind, problem['loc'])}"
            case "missing":
                yield location, f"{name}: required, not set"
            case "value_error":
                yield location, f"{name}: {problem['ctx']['error']}" if name else str(problem["ctx"]["error"])
            case "too_short" if problem["input"]:
                pass  # its entries are wrong, and have sentences of their own
            case "too_short":
                yield location, f"{name} is empty; it needs at least one entry"
            case "model_type" | "model_attributes_type" | "dict_type":
                yield location, f"{name} = {_toml_like(problem['input'])}: must be a table of settings"
            case "union_tag_not_found" | "union_tag_invalid":
                known = ", ".join(tags_at(kind, problem["loc"]))
                yield location, f"{name}.kind: must be one of {known}"
            case _:
                message = problem["msg"][0].lower() + problem["msg"][1:]
                yield location, f"{name} = {_toml_like(problem['input'])}: {message}"


def _toml_like(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
