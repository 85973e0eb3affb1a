"""A reward process: reads items from a socket, writes their rewards back, and never outlives the trainer.

It is started as a program, not through multiprocessing, which would import the trainer's main module, and with it torch
and the model code, into every worker.
"""

from __future__ import annotations

import importlib
import json
import math
import numbers
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from spmdrl.rewards.item import RewardItem
from spmdrl.rewards.sandbox import Sandbox, die_with_parent, empty, enter, limit_cpu

# The program of a worker. Its arguments are the trainer's process id, the socket's descriptor, the trainer's sys.path.
PROGRAM = "import sys; sys.path[:] = sys.argv[3:]; from spmdrl.rewards.worker import main; main()"
SIZE = struct.Struct("<Q")  # comes before each pickled message to a worker
_MAX_REASON_CHARACTERS = 200
_MAX_TRACEBACK_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One verifier that a worker runs."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of the verifier's `load`, if it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A worker's task: the first message it receives."""

    terms: list[Term]
    limit_s: float  # for each item
    sandbox: Sandbox | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A worker's answer for one item: the rewards of the terms, or the reason of a failure."""

    parts: dict[str, float]
    failure: str | None = None
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A worker's answer to its job: why it cannot start, and what its sandbox cannot protect."""

    problem: str | None = None
    unprotected: list[str] = field(default_factory=list)


def main() -> None:
    """Serve requests until the socket closes.

    Messages to a worker are pickles, its answers are lines of JSON: code that runs here may have been written by the
    model, and must not decide what the trainer unpickles.
    """
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # the trainer died before this process asked to die with it
        os._exit(1)
    # Only the trainer ends its workers (with SIGKILL): a signal to the whole job must not fail the last rewards.
    # Empty handlers instead of SIG_IGN, which programs started by a reward function would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    trainer = socket.socket(fileno=int(sys.argv[2]))
    messages = trainer.makefile("rb")
    job = pickle.loads(_receive(messages))
    try:
        unprotected = enter(job.sandbox, trainer.fileno()) if job.sandbox else []
        verifiers = {term.name: _verifier(term) for term in job.terms}
    except Exception as error:
        problem = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        _send(trainer, Start(problem=problem))
        return
    if job.sandbox:
        os.chdir(job.sandbox.folder)  # after loading: a function's file is relative to the trainer's directory
    _send(trainer, Start(unprotected=unprotected))
    while message := _receive(messages):
        if job.sandbox:
            limit_cpu(job.limit_s)
        reply = _reply(verifiers, message)
        if job.sandbox:
            empty(job.sandbox)
        _send(trainer, reply)


def _receive(messages: BinaryIO) -> bytes:
    """Read the next message; empty when the trainer has closed the socket."""
    size = messages.read(SIZE.size)
    return messages.read(SIZE.unpack(size)[0]) if size else b""


def _send(trainer: socket.socket, answer: Reply | Start) -> None:
    trainer.sendall(json.dumps(asdict(answer)).encode() + b"\n")


def _verifier(term: Term) -> Callable[[RewardItem], Any]:
    try:
        module = importlib.import_module(f"spmdrl.rewards.{term.kind}")
    except ImportError as error:
        raise ValueError(
            f'kind = "{term.kind}" needs a package that cannot be imported: {error}; install it, or choose another kind'
        ) from error
    return module.load(**term.settings) if term.settings else module.reward


def _reply(verifiers: dict[str, Callable[[RewardItem], Any]], message: bytes) -> Reply:
    name = "item"
    parts = {}
    try:
        item = pickle.loads(message)
        for name, verifier in verifiers.items():
            parts[name] = _number(verifier(item))
    except BaseException as error:  # whatever a reward function raises, even SystemExit, fails only this item
        reason = f"{name}: {type(error).__name__}: {error}".splitlines()[0][:_MAX_REASON_CHARACTERS]
        return Reply(parts={}, failure=reason, traceback=traceback.format_exc()[-_MAX_TRACEBACK_CHARACTERS:])
    return Reply(parts=parts)


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward is not a number but {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return float(value)
