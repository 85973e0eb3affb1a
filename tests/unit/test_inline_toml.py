"""A value that is written on one line is read as it was."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from spmdrl.tools.program import inline


@pytest.mark.parametrize(
    "value",
    [True, 3, 1e-6, 'a"b\\c\n\x7f ü', [1, "two", [3]], {"a": 1, "b c": {"d": ["e", {"f": False}]}}, [{}, []]],
    ids=repr,
)
def test_a_value_comes_back_from_one_line(value: Any) -> None:
    line = inline(value)
    assert tomllib.loads(f"x = {line}") == {"x": value} and "\n" not in line
    assert inline((1, 2)) == inline([1, 2])
