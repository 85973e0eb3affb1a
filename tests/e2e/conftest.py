"""The model and the configuration that the runs of a module share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.small_run import write_small_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small run's model, reward and configuration."""
    path = tmp_path_factory.mktemp("e2e")
    write_small_run(path, model={"num_layers": 2, "spare_tokens": 1})  # two ranks can split an even vocabulary
    return path
