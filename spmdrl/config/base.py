"""Tables of a configuration: the types of their fields, and the rules that they must keep.

A rule is a function that takes a table and yields a sentence for each mistake. `rule` makes it one. All rules of a
configuration run together, after the fields have been validated, so that the user reads every mistake at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
LARGEST = 1e12  # of a factor: float32 has to hold what it multiplies, and sums of it
Positive = Annotated[float, Field(gt=0.0, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, le=LARGEST, allow_inf_nan=False)]
Coefficient = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]  # below, SGLang samples greedily; beyond, evenly
INT32_MAX = 2**31 - 1  # of anything that is counted: torch and the system count with 32 bits
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
NonNegativeInt = Annotated[int, Field(ge=0, le=INT32_MAX)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e8)]  # of a time limit: clocks overflow after three years
Gib = Annotated[float, Field(gt=0.0, le=2**20)]


def _usable_path(path: str) -> str:
    if not path:
        raise ValueError('is empty; "." is the working directory')
    if "\0" in path:
        raise ValueError("must not hold the character NUL")
    if path.startswith("~"):
        raise ValueError('begins with "~", which only a shell replaces; write the whole path')
    if len(path.encode("utf-8", "surrogatepass")) > 4000 or any(
        len(part.encode("utf-8", "surrogatepass")) > 255 for part in path.split("/")
    ):
        raise ValueError("is longer than any path of a file system")
    return path


PathText = Annotated[str, AfterValidator(_usable_path)]

SettingsRule = Callable[..., Iterator[str]]
SettingsRuleT = TypeVar("SettingsRuleT", bound=SettingsRule)

_RULES: dict[type[BaseModel], list[SettingsRule]] = {}
# True inside a table that is being validated: the outermost table runs the rules of those in it.
_rules_wait: ContextVar[bool] = ContextVar("rules_wait", default=False)


class MissingSetting(BaseException):
    """A setting was read that is wrong or missing, about which the user has a sentence already.

    Not an Exception: code that turns any failure into a sentence must let it pass.
    """


class Section(BaseModel):
    """A table of the TOML file: unknown keys are errors, values are not converted, nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    @model_validator(mode="wrap")
    @classmethod
    def _keeps_its_rules(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        is_outermost = not _rules_wait.get()
        with fields_only():
            section = handler(values)
        if is_outermost and (sentences := list(problems(section))):
            raise ValueError("\n".join(sentences))
        return section

    if not TYPE_CHECKING:  # or else a type checker would take every name for a setting

        def __getattr__(self, name: str) -> Any:
            # Fields are there unless `read.without` has left them out.
            if name in type(self).model_fields:
                raise MissingSetting(name)
            return super().__getattr__(name)


SectionT = TypeVar("SectionT", bound=Section)


@contextmanager
def fields_only() -> Iterator[None]:
    """Validate fields without running rules."""
    token = _rules_wait.set(True)
    try:
        yield
    finally:
        _rules_wait.reset(token)


def rule(*kinds: type[Section]) -> Callable[[SettingsRuleT], SettingsRuleT]:
    """Register a function as a rule of these tables.

    Its sentences call settings by their names in the table, and first the one that the mistake is mainly about.
    """

    def register(function: SettingsRuleT) -> SettingsRuleT:
        for kind in kinds:
            _RULES.setdefault(kind, []).append(function)
        return function

    return register


def rules_of(kind: type[Section]) -> list[SettingsRule]:
    """The rules of a table, those of the classes it derives from first; not those of tables inside it."""
    return [one for base in reversed(kind.__mro__) for one in _RULES.get(base, ())]


def problems(section: Section, table: str = "") -> Iterator[str]:
    """Yield a sentence for each mistake in a table and the tables inside it, after the name of the inner `table`."""
    for name in type(section).model_fields:
        inner = section.__dict__.get(name)
        if isinstance(inner, Section):
            yield from problems(inner, f"{table}.{name}".lstrip("."))
    for sentence in run_rules(rules_of(type(section)), section):
        yield f"{table}: {sentence}" if table else sentence


def run_rules(rules: Iterable[SettingsRule], *about: Any) -> Iterator[str]:
    """Yield the sentences of each rule; one that reads a missing setting says no more."""
    for one in rules:
        with suppress(MissingSetting):
            yield from one(*about)


def is_set(section: Section, name: str) -> bool:
    """True when a setting has another value than its default; False for a missing one."""
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return bool(section.__dict__.get(name, default) != default)


def unused_settings(section: Section, names: Iterable[str], choice: str) -> Iterator[str]:
    """Yield a sentence for each of these settings that is set although `choice` has no use for it."""
    for name in names:
        if is_set(section, name):
            yield f"{name} has no meaning for {choice}; remove it"


def with_defaults(section: Section, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings named in `defaults`, each as it is set or else with its default."""
    given = {name: getattr(section, name) for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def regular_expression(text: str) -> str:
    """Return the text. Raises ValueError when Python cannot compile it."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return text


# The table of a sandbox, which rewards and environments have.


class SandboxConfig(Section):
    mode: Literal["auto", "strict", "off"] = "auto"
    """`auto`: no network, no environment variables, no files to write but in a directory of their own, no other
    processes in reach, nothing printed; a line names what the machine cannot prevent. `strict` refuses to start there.
    `off`: no restrictions, for functions of yours that need none. See `docs/security.md`."""
    max_memory_gib: Gib = 8.0
    """Address space of each process."""
    max_processes: Count = 64
    """Processes and threads of one reward process, itself included. Linux does not hold root to it."""
    max_file_gib: Gib = 0.125
    """Size of each file, and of the directory of a reward process."""
    max_open_files: Annotated[int, Field(ge=16, le=2**20)] = 256
    """Open files of each process."""


@rule(SandboxConfig)
def limits_need_a_sandbox(sandbox: SandboxConfig) -> Iterator[str]:
    if sandbox.mode == "off":
        for name in ("max_memory_gib", "max_processes", "max_file_gib", "max_open_files"):
            if is_set(sandbox, name):
                yield f'{name} has no meaning with mode = "off"; remove one of them'
