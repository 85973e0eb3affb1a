"""These tests need a CUDA device, and say so where there is none."""

from __future__ import annotations

import os

# torch looks at it once, at the first product on a device of the process: a deterministic test would come too late.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let the tests run without pytest-timeout, too, which a machine without network may lack; then without limits."""
    if not pluginmanager.hasplugin("timeout"):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout, which is not installed")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
