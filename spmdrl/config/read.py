"""From a TOML file and overrides to a configuration, or to a sentence for everything that is wrong."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic

from pydantic import ConfigDict, TypeAdapter, ValidationError

from spmdrl.config.base import Section, SectionT, fields_only, problems
from spmdrl.config.errors import (
    ConfigError,
    Places,
    SourceLocation,
    field_mistakes,
    is_whole,
    key_lines,
    sections_in,
    setting_at,
)
from spmdrl.config.strict import read_bytes, shown, utf8_problem
from spmdrl.config.whole import Config, PreferencesConfig, SftConfig, TuningConfig
from spmdrl.conversation import UserError

_MAX_BYTES = 2**20  # of a configuration
_STRICT = ConfigDict(strict=True)  # as in Section


@dataclass(frozen=True, slots=True)
class Draft(Generic[SectionT]):
    """A configuration as the user wrote it, mistakes and all."""

    config: SectionT  # reading a setting that is wrong or missing raises MissingSetting
    _places: Places
    _mistakes: Sequence[tuple[SourceLocation, str]]

    def refuse(self, sentences: Iterable[str] = ()) -> None:
        """Raise UserError when there are mistakes, including those in `sentences`.

        They come in the order of the file, then those on the command line, each with its place.
        """
        found = [*self._mistakes, *((self._places.of_sentence(sentence), sentence) for sentence in sentences)]
        if found:
            in_order = sorted(found, key=lambda one: one[0])
            raise UserError("\n".join(dict.fromkeys(place.prefix + sentence for place, sentence in in_order)))


def read_run_config(path: str, overrides: Sequence[str]) -> Config | TuningConfig:
    """Read the configuration of a run of any kind: [rollout] belongs to `spmdrl.train`, [sft] to `spmdrl.sft`, [pairs]
    to `spmdrl.pairs`.

    Raises UserError as `read_config` does, and when the file has several of these tables or none.
    """
    named = {override.partition("=")[0].strip().partition(".")[0] for override in overrides}
    tables = named | read_table(path).keys()
    kinds: dict[str, type[Config | TuningConfig]] = {"rollout": Config, "sft": SftConfig, "pairs": PreferencesConfig}
    found = [table for table in kinds if table in tables]
    if len(found) != 1:
        has = " and ".join(f"[{table}]" for table in found) or "none of [rollout], [sft] and [pairs]"
        raise UserError(
            f"{path} has {has}, so that it is not clear which program it is for; [rollout] belongs to a run of "
            "spmdrl.train, [sft] to one of spmdrl.sft, [pairs] to one of spmdrl.pairs: have one of them"
        )
    return read_config(kinds[found[0]], path, overrides)


def read_config(kind: type[SectionT], path: str, overrides: Sequence[str]) -> SectionT:
    """Read a TOML file and `key.sub=value` overrides into `kind`. Raises UserError with every mistake found."""
    draft = read_draft(kind, path, overrides)
    draft.refuse()
    return draft.config


def read_draft(kind: type[SectionT], path: str, overrides: Sequence[str]) -> Draft[SectionT]:
    """Read a TOML file and `key.sub=value` overrides into `kind`, and find the mistakes in them.

    Override values are TOML; what is not TOML is taken as a string. Raises UserError when the file is not TOML.
    """
    text = _read_text(path)
    values = _parse(path, text)
    overrides_of: dict[str, int] = {}
    found: list[tuple[SourceLocation, str]] = []
    for number, override in enumerate(overrides):
        if sentence := _override(values, override):
            found.append((SourceLocation(2, number), sentence))
        else:
            overrides_of[override.partition("=")[0].strip()] = number
    places = Places(kind, path, key_lines(text), overrides_of)
    config, mistakes = _validate(kind, values)
    found += [(places.of_setting(one.name), one.sentence) for one in mistakes]
    found += [(places.of_sentence(sentence), sentence) for sentence in problems(config)]
    return Draft(config, places, found)


def read_fields(kind: type[SectionT], path: str, overrides: Sequence[str]) -> SectionT:
    """Read the settings that are in order, without the rules between them, some of which load code of the user's.

    Reading another setting raises MissingSetting. Raises UserError when the file is not TOML.
    """
    values = read_table(path)
    for override in overrides:
        _override(values, override)
    return _validate(kind, values)[0]


def read_table(path: str) -> dict[str, Any]:
    """Read a TOML file as tables of settings, whatever they are. Raises UserError when it is not TOML."""
    return _parse(path, _read_text(path))


def _validate(kind: type[SectionT], values: dict[str, Any]) -> tuple[SectionT, list[ConfigError]]:
    """The configuration with the settings that are in order, and the mistakes in the others; no rules are run."""
    mistakes = {mistake.name: mistake for mistake in _beyond_toml(kind, values)}
    with fields_only():
        try:
            config = kind.model_validate(values)
        except ValidationError as error:
            mistakes = {mistake.name: mistake for mistake in field_mistakes(kind, values, error)} | mistakes
        if mistakes:
            config = without({mistake.missing for mistake in mistakes.values()}, kind, values)
    return config, list(mistakes.values())


def without(missing: Collection[str], kind: type[SectionT], values: Mapping[str, Any], table: str = "") -> SectionT:
    """The table of these values without the settings that are `missing`; reading one raises MissingSetting."""
    known: dict[str, Any] = {}
    for key, field in kind.model_fields.items():
        name, sections = table + key, sections_in(field.annotation)
        has_gaps = any(setting.startswith(f"{name}.") for setting in missing)
        if name in missing or (key not in values and field.is_required()):
            continue
        if sections and not is_whole(field.annotation) and (has_gaps or key in values):
            known[key] = without(missing, sections[0], values.get(key, {}), f"{name}.")
        elif key in values:
            described: Any = Annotated[field.annotation, field]
            known[key] = TypeAdapter(described, config=_STRICT).validate_python(values[key])
        else:
            known[key] = field.get_default(call_default_factory=True)
    found = kind.model_construct(**known)
    for key in kind.model_fields.keys() - known.keys():
        vars(found).pop(key, None)  # pydantic has put its default there
    return found


def _read_text(path: str) -> str:
    try:
        text = read_bytes(path, max_bytes=_MAX_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read the configuration {shown(path)}: it is not UTF-8 text") from error
    except UserError as error:
        raise UserError(str(error).replace("cannot read", "cannot read the configuration", 1)) from error
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
    except ValueError as error:  # a whole number of thousands of digits
        raise UserError(f"{path} is not valid TOML: {error}") from error


def _override(values: dict[str, Any], override: str) -> str | None:
    """Set one `a.b.c=value` in `values`. Returns a sentence where that cannot be done."""
    dotted, equals, written = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        return f"{override!r} on the command line is not of the form section.key=value"
    try:
        parsed = tomllib.loads(f"value = {written}")
    except RecursionError:
        return f"{dotted} on the command line is nested too deeply"
    except ValueError:  # no TOML, or a whole number of thousands of digits
        parsed = {"value": written}
    if parsed.keys() != {"value"}:
        return f"{dotted} on the command line is followed by other settings; give each as an argument of its own"
    value = parsed["value"]
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            return f"{dotted}: {key} is a value, not a table of settings"
    table[keys[-1]] = value
    return None


def _beyond_toml(kind: type[Section], value: Any, location: tuple[str | int, ...] = ()) -> Iterator[ConfigError]:
    """Yield what Python's reader of TOML lets pass: whole numbers of more than 64 bits, NUL in text."""
    name = ".".join(map(str, location))
    match value:
        case dict() | list():
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in entries:
                yield from _beyond_toml(kind, inner, (*location, key))
        case int() if not -(2**63) <= value < 2**63:
            sentence = f"{name}: whole numbers have 64 bits, and this one needs {value.bit_length() + 1}"
            yield ConfigError(name, sentence, setting_at(kind, location))
        case str() if problem := utf8_problem(value):
            yield ConfigError(name, f"{name} {problem}", setting_at(kind, location))
        case str() if "\0" in value:
            yield ConfigError(name, f"{name}: text must not hold the character NUL", setting_at(kind, location))
