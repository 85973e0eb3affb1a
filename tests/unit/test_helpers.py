"""Code that tests share is in tests/helpers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from spmdrl.data import sources
from spmdrl.train import main
from tests.helpers.broken_library import break_library
from tests.helpers.small_run import sums_from_files, write_small_run

TESTS = Path(__file__).parents[1]
# Helpers, what plays a device, and the program that runs the tests of devices.
IMPORTED = ("tests.helpers", "tests.emulated_cuda", "tests.fake_cuda.build", "tests.gpu.proof")


def test_no_test_module_is_imported() -> None:
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            wrong = [name for name in names if name.startswith("tests.") and not name.startswith(IMPORTED)]
            assert not wrong, f"{path.relative_to(TESTS)} imports {wrong}: move what it needs to tests/helpers"


def test_a_run_from_files_needs_no_reasoning_gym(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of devices read files, because they run on machines that lack reasoning-gym."""
    monkeypatch.setattr(sources, "_ITEMS", {})  # what other tests have imported
    for library in ("reasoning_gym", "math_verify"):
        break_library(library, tmp_path, monkeypatch)
    model = {"hidden_size": 32, "num_layers": 1}
    from_files = write_small_run(tmp_path, model=model, **sums_from_files(tmp_path))
    assert main([str(from_files), "--dry-run"]) == 0
    assert main([str(write_small_run(tmp_path, model=model)), "--dry-run"]) == 2
