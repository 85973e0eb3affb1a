"""Calls of the user's code in an environment's process, sync or async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any


async def run(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call a function and return its result; one that is not async runs in a thread, so that others are not held up.

    Raises RuntimeError for a function that calls sys.exit, which would end all episodes of the process.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        result = await asyncio.to_thread(_call, function, arguments)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise _exit_error(function, error) from error


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except SystemExit as error:  # a thread hands it to the event loop, which would end
        raise _exit_error(function, error) from error


def _exit_error(function: Callable[..., Any], error: SystemExit) -> RuntimeError:
    named = getattr(function, "func", function)  # of a partial call
    return RuntimeError(f"{getattr(named, '__name__', 'it')} called sys.exit({error.code!r})")
