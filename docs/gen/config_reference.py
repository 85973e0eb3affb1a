"""Generate docs/configuration.md, every setting of `spmdrl.config`: `python -m docs.gen.config_reference`."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from spmdrl.config import Config, PreferencesConfig, Section, SftConfig
from spmdrl.config.base import INT32_MAX
from spmdrl.config.errors import is_array, is_by_name, sections_in
from spmdrl.faults.text import say

_INTRODUCTION = """\
# Configuration

<!-- Generated from the tables in spmdrl/config/ by `make docs`; a test compares the two. -->

A run is described by one TOML file. `section.key=value` after it on the command line overrides a setting; the value is
read as TOML, and as text when it is not TOML:

    python -m spmdrl.train configs/demo.toml optim.lr=3e-6 run.name=second --dry-run

Unknown keys, values of the wrong type and counts that do not fit together are errors, and all of them are shown at once
within a second. The models, data and code that settings name are checked next, and again all errors are shown.
`--dry-run` checks a configuration and everything it names, prints it with the defaults filled in, and names the
checkpoint from which the run would resume; `--ranks N` sets the number of ranks to check for. The run's folder keeps
the resolved file as `config.toml`.

A setting without a default is required.
"""


def reference() -> str:
    """The page as Markdown."""
    parts = [_INTRODUCTION]
    described: dict[type[Section], str] = {}  # the name under which a table has its section
    kinds = ((Config, "spmdrl.train"), (SftConfig, "spmdrl.sft"), (PreferencesConfig, "spmdrl.pairs"))
    for kind, program in kinds:
        parts.append(f"## `python -m {program}`\n\n{kind.__doc__}\n")
        fields = [(key, field) for key, field in kind.model_fields.items() if sections_in(field.annotation)]
        if len(fields) < len(kind.model_fields):
            parts.append(f"Above the first table of the file:\n\n{_table(kind)}")
        repeated = {key: _title(key, field) for key, field in fields if sections_in(field.annotation)[0] in described}
        if repeated:
            links = (f"[`[{title}]`](#{title.replace('.', '').lower()})" for title in repeated.values())
            parts.append(f"{', '.join(links)} are described above.\n")
        parts += [_section(key, field, described) for key, field in fields if key not in repeated]
    return "\n".join(parts)


def settings(kind: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every setting of a Section class and of the sections inside it, with its dotted name."""
    for key, field in kind.model_fields.items():
        inner = sections_in(field.annotation)
        if not inner or is_array(field.annotation):
            yield prefix + key, field
        for section in inner:
            yield from settings(section, f"{prefix}{key}.")


def _title(name: str, field: FieldInfo) -> str:
    return f"{name}.NAME" if is_by_name(field.annotation) else name


def _section(name: str, field: FieldInfo, described: dict[type[Section], str]) -> str:
    """A table of the TOML file, and the tables inside it."""
    (section,) = sections_in(field.annotation)
    name = _title(name, field)
    described[section] = name
    parts = [f"### `[{name}]`\n"]
    if is_by_name(field.annotation):
        parts.append("A table for each, under names of yours.\n")
    elif not field.is_required():
        parts.append("Off when left out.\n" if field.default is None else "Every setting has a default.\n")
    parts.append(_table(section))
    for key, inner in section.model_fields.items():
        if is_array(inner.annotation):
            parts += _array(f"{name}.{key}", sections_in(inner.annotation), described)
        elif len(kinds := sections_in(inner.annotation)) > 1:
            parts += _kinds(f"[{name}.{key}]", f"{name}.{key}", kinds, described)
        elif kinds:
            parts.append(_section(f"{name}.{key}", inner, described))
    return "\n".join(parts)


def _array(name: str, kinds: Sequence[type[Section]], described: dict[type[Section], str]) -> Iterator[str]:
    """Describe an array of tables, each of which has one of several kinds, or all the same settings."""
    if kinds[0] in described:
        others = [kind for kind in kinds if kind not in described]
        end = ", or:" if others else "."
        yield f"Each `[[{name}]]` has one of the kinds described under `[[{described[kinds[0]]}]]`{end}\n"
        yield from _kinds(f"[[{name}]]", name, others, described)
        return
    if "kind" in kinds[0].model_fields:
        yield from _kinds(f"[[{name}]]", name, kinds, described)
    else:
        described[kinds[0]] = name
        yield f"#### `[[{name}]]`\n"
        yield _table(kinds[0])


def _kinds(title: str, name: str, kinds: Sequence[type[Section]], described: dict[type[Section], str]) -> Iterator[str]:
    """Describe a table that has one of several kinds, and the arrays inside it."""
    for kind in kinds:
        described[kind] = name
        tags = " or ".join(f'`kind = "{tag}"`' for tag in get_args(kind.model_fields["kind"].annotation))
        yield f"#### `{title}` with {tags}\n"
        yield f"{_sentence(kind.model_fields['kind'])}\n"
        if len(kind.model_fields) > 1:
            yield _table(kind, without=("kind",))
        for key, inner in kind.model_fields.items():
            nested = sections_in(inner.annotation)
            if is_array(inner.annotation):
                yield from _array(f"{name}.{key}", nested, described)
            elif nested and nested[0] not in described:
                described[nested[0]] = f"{name}.{key}"
                yield f"#### `[{name}.{key}]`\n\n{_sentence(inner)}\n"
                yield _table(nested[0])
            elif nested:
                same = described[nested[0]]
                yield f"Its table `{key}` has the settings of [`[{same}]`](#{same.replace('.', '').lower()}).\n"


def _table(section: type[Section], without: Sequence[str] = ()) -> str:
    rows = ["| key | value | default | |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        if key in without or (sections_in(field.annotation) and not is_array(field.annotation)):
            continue
        cells = (f"`{key}`", _value(field.annotation, field.metadata), _default(field), _sentence(field))
        escaped = [cell.replace("|", "\\|") for cell in cells]
        rows.append(f"| {' | '.join(escaped)} |")
    return "\n".join([*rows, ""])


def _sentence(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "unset" if default is None else f"`{_toml(default)}`"


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value)
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case {}:
            return "{}"
    return str(value)


def _value(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the allowed values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(arguments[0], [*metadata, *arguments[1:]])
    if origin is Literal:
        return ", ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        alternatives = [part for part in arguments if part is not type(None)]
        return " or ".join(_value(part, metadata) for part in alternatives)
    if origin is tuple:
        many = [part for part in arguments if part is not Ellipsis]
        if sections_in(annotation):
            return "array of tables, at least one" if _bounds(metadata, "min_length") else "array of tables"
        items = _value(many[0], ())
        return f"list of {len(many)}: {items}" if Ellipsis not in arguments else f"list: {items}"
    words = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text", datetime: "date and time"}.get(
        annotation, "table"
    )
    return ", ".join([words, *_range(metadata)])


def _range(metadata: Sequence[Any]) -> Iterator[str]:
    lowest = _bounds(metadata, "ge")
    highest = [bound for bound in _bounds(metadata, "le") if bound < INT32_MAX]  # beyond it, no user meets the limit
    if lowest and highest:
        yield f"{lowest[0]:g} to {highest[0]:g}"
        return
    yield from (f"at least {bound:g}" for bound in lowest)
    yield from (f"above {bound:g}" for bound in _bounds(metadata, "gt"))
    yield from (f"at most {bound:g}" for bound in highest)
    yield from (f"below {bound:g}" for bound in _bounds(metadata, "lt"))


def _bounds(metadata: Sequence[Any], name: str) -> list[float]:
    """Return the bounds with this name; pydantic wraps the bounds of an inner annotation in a FieldInfo."""
    flat = [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    return [bound for item in flat if (bound := getattr(item, name, None)) is not None]


if __name__ == "__main__":
    say(reference().removesuffix("\n"))
