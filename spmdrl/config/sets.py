"""Evaluation sets by name: where they are, what their columns mean, and how their answers are rewarded."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GENERATED = "reasoning_gym/"  # before the name of a task
GENERATED_ITEMS = 100
_TABLE = Path(__file__).with_name("evaluation_sets.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """A data set on a hub with questions of one final answer each."""

    repository: str
    split: str
    prompt_column: str
    answer_column: str
    about: str
    answer_after: str | None = None


@cache
def known_sets() -> Mapping[str, EvaluationSet]:
    """Return the sets that have names."""
    return {name: EvaluationSet(**table) for name, table in tomllib.loads(_TABLE.read_text(encoding="utf-8")).items()}


def set_name(name: str) -> str:
    """Return a name that a set has. Raises ValueError where none has it."""
    if not name.startswith(GENERATED) and name not in known_sets():
        near = difflib.get_close_matches(name, known_sets(), n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"is no evaluation set; {meant}there are {', '.join(known_sets())}, and {GENERATED}TASK of reasoning-gym"
        )
    return name
