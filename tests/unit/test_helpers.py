"""Code that tests share is in tests/helpers."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_test_module_is_imported() -> None:
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            wrong = [name for name in names if name.startswith("tests.") and not name.startswith("tests.helpers")]
            assert not wrong, f"{path.relative_to(TESTS)} imports {wrong}: move what it needs to tests/helpers"
