"""The fields and rules that the tables of a configuration share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]

BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of the TOML file: unknown keys are errors, values are not converted, nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


SectionT = TypeVar("SectionT", bound=Section)


def with_defaults(section: Section, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings named in `defaults`, as they are set or else with their default."""
    given = {name: getattr(section, name) for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def refuse_settings_of_others(section: Section, known: Iterable[str], used: Iterable[str], choice: str) -> None:
    """Raises ValueError when one of the `known` settings is set but not among those that `choice` has a use for."""
    for name in sorted(set(known) - set(used)):
        if getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True):
            raise ValueError(f"{name} has no meaning for {choice}; remove it")
