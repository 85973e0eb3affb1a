"""Calls of the C library that Python has no name for."""

from __future__ import annotations

import ctypes
import os
from typing import Any


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library and return what it does. Raises OSError where that is negative."""
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
