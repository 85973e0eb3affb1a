"""These tests need SGLang, and say so where it is not installed. Ranks come from `engine_ranks`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("sglang") is not None:
        return
    for item in items:
        if "tests/engine" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="SGLang is not installed: make setup-sglang"))
