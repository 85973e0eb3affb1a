"""Starts the check and the ranks of a run by forks of one process, which imports once what each of them would import.

That process computes nothing itself, and becomes torchrun's agent. Only for ranks without a GPU: no device has been
used by forked ones yet.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from ctypes import c_bool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import IO

from spmdrl.faults.supervise import REQUESTS, Process, die_with_parent, dry_run
from spmdrl.faults.verdict import SUPERVISED

ProgramMain = Callable[[Sequence[str]], int]  # the `main` of a module

_FORK = multiprocessing.get_context("fork")


class Forked:
    """A `supervise.Starter`. A context: at its end, the process that has imported everything has ended too."""

    def __init__(self, module: str, arguments: Sequence[str], *, num_ranks: int) -> None:
        self._run = _ForkedRun(module, tuple(arguments), num_ranks)
        self._word, self._say = _FORK.Pipe(duplex=False)  # to start the ranks
        self._agent: _ForkedAgent | None = None

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._word.close()
        self._say.close()
        if self._agent is not None:
            self._agent.process.join()

    def check(self, output: IO[str]) -> Process:
        """Start the imports, and after them the dry run; see `Starter`."""
        passed: c_bool = _FORK.RawValue(c_bool, False)
        process = _FORK.Process(target=_prepare, args=(self._run, output, passed, self._word, self._say))
        process.start()
        self._agent = _ForkedAgent(process)
        return _ForkedCheck(process, passed)

    def ranks(self) -> Process:
        """Start the ranks; see `Starter`."""
        assert self._agent is not None, "the check comes first"
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its exit code says how
            self._say.send(True)
        return self._agent


@dataclass(frozen=True, slots=True)
class _ForkedRun:
    module: str
    arguments: tuple[str, ...]
    num_ranks: int


@dataclass(frozen=True, slots=True)
class _ForkedAgent:
    process: ForkProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()


@dataclass(frozen=True, slots=True)
class _ForkedCheck(_ForkedAgent):
    passed: c_bool

    def poll(self) -> int | None:
        return 0 if self.passed.value else self.process.exitcode


def _prepare(run: _ForkedRun, output: IO[str], passed: c_bool, word: Connection, say: Connection) -> None:
    """Import the program, check its settings in a fork, and run its ranks when the word comes."""
    os.setsid()
    die_with_parent()
    _forget_handlers()
    say.close()  # so that the end of the launch is the end of waiting for its word
    gc.disable()  # all that is imported stays, and looking through it again and again takes long
    module = importlib.import_module(run.module)
    module.prepare(run.arguments)
    program: ProgramMain = module.main
    gc.freeze()  # the forks share it for as long as they do not write to it
    gc.enable()
    check = _FORK.Process(target=_check, args=(program, dry_run(run.arguments, run.num_ranks), output))
    check.start()
    from spmdrl.faults.torchrun import run_forked  # only here, so that the check need not wait for it

    check.join()
    if check.exitcode:
        sys.exit(check.exitcode if check.exitcode > 0 else 128 - check.exitcode)
    passed.value = True
    try:
        word.recv()
    except EOFError:
        return
    os.environ[SUPERVISED] = "1"
    sys.exit(run_forked(_rank, program, run.arguments, num_ranks=run.num_ranks))


def _forget_handlers() -> None:
    """Let signals do here what they do to a process that was started by a command."""
    for number in (*REQUESTS, signal.SIGQUIT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _check(program: ProgramMain, arguments: Sequence[str], output: IO[str]) -> None:
    os.dup2(output.fileno(), sys.stdout.fileno())
    sys.exit(program(arguments))


def _rank(program: ProgramMain, arguments: Sequence[str]) -> None:
    die_with_parent()
    _forget_handlers()
    logging.disable(logging.NOTSET)  # it is the agent that is quiet
    sys.exit(program(arguments))
