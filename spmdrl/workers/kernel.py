"""Calls of the C library that Python has no name for."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library and return what it does. Raises OSError where that is negative."""
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def signal_at_parents_end(number: signal.Signals) -> None:
    """Ask Linux for a signal when the thread that started this process ends."""
    if sys.platform == "linux":
        call("prctl", _PR_SET_PDEATHSIG, number, 0, 0, 0)
