"""The nouns in JSON's types, as checkpoints and recorded steps hold them: one adapter of pydantic for each kind."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter

from spmdrl.conversation import Action, Observation
from spmdrl.types import ImageSpan, Prompt

T = TypeVar("T")
# Keys in files that are not the names of fields: older runs have written them.
_KEYS = {"initial_observation": "greeting", "sequence_segment": "sequence_part"}
# An infinity or nan stays a number. Not strict: a list may be a tuple, and a dictionary a dataclass. Not by
# `validate_json`, which takes no half of a surrogate pair; a policy may write one into the arguments of a call.
_CONFIG = ConfigDict(extra="forbid", ser_json_inf_nan="constants", alias_generator=lambda name: _KEYS.get(name, name))


class Codec(Generic[T]):
    """Converts values of one kind to JSON's types and back."""

    def __init__(self, kind: Any) -> None:
        """`kind` is a type as an annotation has it."""
        self._kind = kind

    def dump(self, value: T) -> Any:
        """Convert a value to JSON's types."""
        return self._adapter.dump_python((value,), mode="json", by_alias=True)[0]

    def load(self, dumped: Any) -> T:
        """Restore what `dump` made, or JSON of that. Raises ValueError where it is of another form."""
        value: T = self._adapter.validate_python((dumped,))[0]
        return value

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        kind: Any = tuple.__class_getitem__(self._kind)  # a dataclass itself takes no config
        return TypeAdapter(kind, config=_CONFIG)


IMAGES = Codec[tuple[ImageSpan, ...]](tuple[ImageSpan, ...])
OBSERVATIONS = Codec[list[Observation | None]](list[Observation | None])
ACTIONS = Codec[list[Action | None]](list[Action | None])
PROMPTS = Codec[list[Prompt]](list[Prompt])
