"""Code of the user's by name, and calls that pass what a function's parameters name.

Reward processes import this module too, so it imports nothing beyond Python.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


def load(name: str) -> Callable[..., Any]:
    """Import the function or class of the name `package.module:function` or `path/to/file.py:function`.

    Raises ValueError, with a sentence that does not repeat the setting, when there is none.
    """
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute:
        raise ValueError("it must look like package.module:function or path/to/file.py:function")
    module = _import(module_name)
    if not hasattr(module, attribute):
        callables = [key for key, value in vars(module).items() if inspect.isfunction(value) or inspect.isclass(value)]
        near = difflib.get_close_matches(attribute, callables, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{module_name} has no function or class {attribute}{hint}")
    found = getattr(module, attribute)
    if not callable(found):
        raise ValueError(f"{attribute} of {module_name} is neither a function nor a class, but {type(found).__name__}")
    return found


def call(function: Callable[..., Any], columns: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Call a function with its settings and those of the columns that it has a parameter for, or all under `**`.

    Raises RuntimeError for a function that calls sys.exit, which would end the run as if it had succeeded.
    """
    names = asked_for(function, columns)
    try:
        return function(**{name: columns[name] for name in columns if name in names}, **settings)
    except SystemExit as error:
        raise RuntimeError(f"{getattr(function, '__name__', 'it')} called sys.exit({error.code!r})") from error


def asked_for(function: Callable[..., Any], columns: Iterable[str]) -> set[str]:
    """Return those of the columns that a function has a parameter for; all for one that takes `**`."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name for name in columns if takes_all or name in parameters}


def argument_problems(
    function: Callable[..., Any], columns: Iterable[str], settings: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each reason why `call` cannot call a function with these columns and settings."""
    columns, name = list(columns), getattr(function, "__name__", "it")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        yield f"the parameters of {name} cannot be read: {error}"
        return
    there_are = f"columns are {', '.join(columns)}"
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            yield f"{name} takes {parameter.name} by position only, but it is called by keyword"
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in settings:
            continue
        elif parameter.default is parameter.empty and parameter.name not in columns:
            yield f"{name} asks for {parameter.name}, which is neither a column nor in params; {there_are}"
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    for setting in settings:
        if setting in columns:
            yield f"params has {setting}, which is the name of a column; use another name"
        elif not takes_all and setting not in {parameter.name for parameter in parameters}:
            yield f"params has {setting}, but {name} takes no such argument"


def with_metrics(result: Any) -> tuple[Any, dict[str, Any]]:
    """Split what a function returned into its value and its metrics, if it returned the two as a pair."""
    match result:
        case (value, dict() as metrics):
            return value, metrics
    return result, {}


def _import(name: str) -> ModuleType:
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        raise ValueError(f"there is no file {name}")
    try:
        return _import_file(Path(name).resolve()) if is_file else importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a module may do anything when it is imported
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"there is no module {error.name}") from error
        raise ValueError(f"{name} cannot be imported: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The place and the message of an error, on one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else f"{last.filename}:{last.lineno}"
    message = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{place}: {type(error).__name__}: {message}"


_FOLDERS: dict[str, None] = {}  # of files that were imported, in their order, where Python does not look by itself


def _import_neighbours_from(folder: str) -> None:
    """Let a file import its neighbours, and none of the same name from the folder of another file.

    Neighbours cannot hide a module of Python's: their folder is among the last places to look.
    """
    others = [other for other in _FOLDERS if other != folder]
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if origin and str(Path(origin).parent) in others and Path(folder, f"{name}.py").is_file():
            del sys.modules[name]  # who has imported it keeps it
    if folder in _FOLDERS or folder not in sys.path:
        _FOLDERS[folder] = None
        sys.path[:] = [*(entry for entry in sys.path if entry not in _FOLDERS), folder, *others]


@cache
def _import_file(path: Path) -> ModuleType:
    _import_neighbours_from(str(path.parent))
    name = f"user_code:{path}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
