"""A reward function of the user's, from a module or from a file."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from spmdrl.rewards.item import RewardItem


def load(function: str) -> Callable[[RewardItem], Any]:
    """The function that `function`, `package.module:function` or `path/to/file.py:function`, names, as a verifier.

    It is called with the keyword arguments prompt, response, answer and metadata; if it is async, it is awaited.
    """
    module_name, _, function_name = function.rpartition(":")
    if not module_name:
        raise ValueError("must look like package.module:function or path/to/file.py:function")
    module = _import(module_name)
    found = getattr(module, function_name, None)
    if not callable(found):
        callables = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(function_name, callables, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{module_name} has no function {function_name}{hint}")
    _require_arguments(found)

    def score(item: RewardItem) -> Any:
        value = found(prompt=item.prompt, response=item.response, answer=item.answer, metadata=item.metadata)
        return asyncio.run(_result(value)) if inspect.isawaitable(value) else value

    return score


def _import(name: str) -> ModuleType:
    is_file = name.endswith(".py")
    if is_file and not Path(name).is_file():
        raise ValueError(f"there is no file {name}")
    try:
        return _import_file(Path(name)) if is_file else importlib.import_module(name)
    except BaseException as error:  # a module may do anything, sys.exit included
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"there is no module {error.name}") from error
        raise ValueError(f"{name} cannot be imported:\n{traceback.format_exc()}") from error


def _import_file(path: Path) -> ModuleType:
    # It can import its neighbours, but neither they nor it can hide a module of Python's.
    sys.path.append(str(path.parent.resolve()))
    name = f"reward_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _require_arguments(function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(prompt="", response="", answer=None, metadata={})
    except TypeError as error:
        raise ValueError(
            f"{getattr(function, '__name__', 'it')} must take the keyword arguments prompt, response, answer and "
            f"metadata: {error}"
        ) from error


async def _result(value: Awaitable[Any]) -> Any:
    return await value
