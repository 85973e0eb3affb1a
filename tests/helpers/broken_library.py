"""A library that is installed, but not all that it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def break_library(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let `name` fail to be imported here and in new processes; return the error's words for the module it lacks."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(f"import what_{name}_needs\n")
    for module in [module for module in sys.modules if f"{module}.".startswith(f"{name}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(str(folder))
    return f"No module named 'what_{name}_needs'"
