"""Load code of the user's by name: `file.py:name` or `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load(name: str) -> Any:
    """Load what `name` names. Raises ValueError, saying what is wrong, when there is no such module or attribute."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name:
        raise ValueError("must look like package.module:name or path/to/file.py:name")
    module = _import(module_name)
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{module_name} has no {attribute}{hint}")
    return getattr(module, attribute)


def _import(name: str) -> ModuleType:
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        raise ValueError(f"there is no file {name}")
    try:
        return _import_file(Path(name).resolve()) if is_file else importlib.import_module(name)
    except BaseException as error:  # a module may do anything, sys.exit included
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"there is no module {error.name}") from error
        raise ValueError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    # It can import its neighbours, but neither they nor it can hide a module of Python's.
    name = f"user_file_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
