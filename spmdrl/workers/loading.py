"""The wait for processes that import the user's code: one that takes long says what is waited for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from spmdrl.config.base import Section
from spmdrl.faults.text import one_line
from spmdrl.faults.verdict import tell_once_a_node

TELL_AFTER_S = 10.0
_LEFT_OUT = {"params", "args", "weight"}  # of the settings, in what is said of them

LoadedT = TypeVar("LoadedT")


def all_loaded(
    started: Sequence[Future[LoadedT]], setting: str, sections: Sequence[Section], *, limit_s: float
) -> list[LoadedT]:
    """Wait for processes to load what a setting's sections name; returns their answers, or raises what they raise.

    A wait of more than `TELL_AFTER_S` is told once on the console. The limit is theirs, and only told here.
    """
    if wait(started, TELL_AFTER_S).not_done:
        what = one_line(" and ".join(map(_written, sections)))
        tell_once_a_node(f"waiting for {setting} to be loaded: {what}; it is given up after {limit_s:g} s")
    return [future.result() for future in started]


def _written(section: Section) -> str:
    settings = section.model_dump(mode="json", exclude=_LEFT_OUT, exclude_defaults=True)
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())
