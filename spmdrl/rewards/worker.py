"""A reward process: reads items from a socket, writes their rewards back, and never outlives the trainer."""

from __future__ import annotations

import numbers
import os
import pickle
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from spmdrl.faults.text import of_error
from spmdrl.rewards import verifiers
from spmdrl.rewards.verifiers import Verifier
from spmdrl.workers.channel import bounded, connect, line, program, receive
from spmdrl.workers.program import clear
from spmdrl.workers.sandbox import Sandbox, continue_below, enter, limit_cpu

PROGRAM = program("spmdrl.rewards.worker")
_MAX_REASON_CHARACTERS = 200
_MAX_TRACEBACK_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One verifier that a worker runs."""

    name: str
    kind: str
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of the verifier's `load`, if it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardJob:
    """A worker's task: the first message it receives."""

    terms: list[Term]
    limit_s: float  # for each item
    sandbox: Sandbox | None


def main() -> None:
    """Serve requests until the socket closes."""
    trainer = connect()
    messages = trainer.makefile("rb")
    job = pickle.loads(receive(messages))
    try:
        walls = enter(job.sandbox, trainer.fileno()) if job.sandbox else continue_below(trainer.fileno())
        loaded = {term.name: verifiers.load(term.kind, term.settings) for term in job.terms}
        users = {term.name for term in job.terms if term.kind == "function"}
    except Exception as error:
        problem = str(error) if isinstance(error, ValueError) else of_error(error)
        trainer.sendall(line({"problem": problem}))
        return
    if job.sandbox:
        os.chdir(job.sandbox.folder)  # after loading: a function's file is relative to the trainer's directory
    trainer.sendall(line({"unprotected": walls.missing}))
    while message := receive(messages):
        if job.sandbox:
            limit_cpu(job.limit_s)
        reply = _reply(loaded, message, users)
        clear(walls)
        trainer.sendall(line(reply))


def _reply(loaded: dict[str, Verifier], message: bytes, users: Collection[str]) -> dict[str, Any]:
    """Return the rewards of an item's terms, or the reason of a failure, as the rank reads them.

    `users` are the terms that are code of the user's, who needs the traceback of what it raises.
    """
    name = "item"
    parts = {}
    try:
        item = pickle.loads(message)
        for name, verifier in loaded.items():
            parts[name] = _number(verifier(item))
    except BaseException as error:  # whatever a reward function raises, even SystemExit, fails only this item
        is_sentence = isinstance(error, ValueError) and name in loaded.keys() - users
        reason = f"{name}: {error}" if is_sentence else f"{name}: {of_error(error)}"
        how = "" if is_sentence else traceback.format_exc()[-_MAX_TRACEBACK_CHARACTERS:]
        return {"parts": {}, "failure": reason.splitlines()[0][:_MAX_REASON_CHARACTERS], "traceback": how}
    return {"parts": parts, "failure": None, "traceback": ""}


def _number(value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise TypeError(f"the reward is not a number but {type(value).__name__}")
    return bounded("the reward", value)
