"""A reward process: reads items from a pipe, writes their scores back, and never outlives the trainer.

It is started as a program of its own rather than by multiprocessing, which would import the trainer's main module, and
with it torch and the model code, into every worker.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import numbers
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from spmdrl.rewards.item import RewardItem

# What a worker runs; its arguments are the trainer's process id, the pipe's descriptor, and the trainer's sys.path.
PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from spmdrl.rewards.worker import main; main()"
_PR_SET_PDEATHSIG = 1
_MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One verifier that a worker runs."""

    name: str
    kind: str
    function: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A worker's answer for one item: the parts, or why there are none."""

    parts: dict[str, float]
    failure: str | None = None
    traceback: str = ""


def main() -> None:
    """Serve until the pipe closes. The first message is the list of terms; the reply is what is wrong with them."""
    _die_with(int(sys.argv[1]))
    # The trainer decides when its workers end (with SIGKILL): signals to a whole job must not fail its last rewards.
    # Handlers that do nothing, and not SIG_IGN, which programs started by a reward function would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    connection = Connection(int(sys.argv[2]))
    try:
        verifiers = {term.name: _verifier(term) for term in connection.recv()}
    except Exception as error:
        connection.send(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        connection.send(_reply(verifiers, message))


def _die_with(trainer_pid: int) -> None:
    """Ask Linux to kill us when the trainer dies; elsewhere the closed pipe ends us after the current item."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer_pid:  # it died before we asked
        os._exit(1)


def _verifier(term: Term) -> Callable[[RewardItem], Any]:
    module = importlib.import_module(f"spmdrl.rewards.{term.kind}")
    return module.score if term.function is None else module.load(term.function)


def _reply(verifiers: dict[str, Callable[[RewardItem], Any]], message: bytes) -> Reply:
    name = "item"
    parts = {}
    try:
        item = pickle.loads(message)
        for name, verifier in verifiers.items():
            parts[name] = _number(verifier(item))
    except BaseException as error:  # whatever a reward function raises, SystemExit included, is about this item only
        reason = f"{name}: {type(error).__name__}: {error}".splitlines()[0][:_MAX_REASON_CHARACTERS]
        return Reply(parts={}, failure=reason, traceback=traceback.format_exc())
    return Reply(parts=parts)


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward is not a number but {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return float(value)
