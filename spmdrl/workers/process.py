"""A sandboxed process, seen from the rank that starts, asks and kills it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from spmdrl.config import SandboxConfig
from spmdrl.config.base import Section
from spmdrl.faults.text import lines, one_line
from spmdrl.faults.verdict import print_once_per_node
from spmdrl.types import UserError
from spmdrl.workers.channel import SIZE
from spmdrl.workers.folders import HeldFolder
from spmdrl.workers.sandbox import Sandbox

# The wait for processes that import the user's code: one that takes long says what is waited for.


TELL_AFTER_S = 10.0
_LEFT_OUT = {"params", "args", "weight"}  # of the settings, in what is said of them

LoadedT = TypeVar("LoadedT")


def all_loaded(
    started: Sequence[Future[LoadedT]], setting: str, sections: Sequence[Section], *, limit_s: float
) -> list[LoadedT]:
    """Wait for processes to load what a setting's sections name; returns their answers, or raises what they raise.

    A wait of more than `TELL_AFTER_S` is told once on the console. The limit is theirs, and only told here.
    """
    if wait(started, TELL_AFTER_S).not_done:
        what = one_line(" and ".join(map(_written, sections)))
        print_once_per_node(f"waiting for {setting} to be loaded: {what}; it is given up after {limit_s:g} s")
    return [future.result() for future in started]


def _written(section: Section) -> str:
    settings = section.model_dump(mode="json", exclude=_LEFT_OUT, exclude_defaults=True)
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())


INVALID_ANSWER = "the worker's answer is invalid"
START_LIMIT_S = 300.0  # to import the user's code and its packages
_POLL_S = 0.1  # how often a waiting thread checks whether its pool was closed
_END_S = 2.0  # for a process to end by itself
_MAX_ANSWER_BYTES = 2**20
_READ_BYTES = 2**16  # at once: an answer is mostly short, and a large buffer is mapped anew for each
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")  # the only environment variables in a sandbox

T = TypeVar("T")


class NoAnswer(Exception):
    """The reason why a process has not answered; the process is dead."""


class WorkerProcess:
    """One process in a sandbox of its own, which runs a program of `channel.program`.

    Start it from a thread that outlives it: Linux's parent-death signal arrives when that thread ends.
    """

    def __init__(
        self, program: str, table: str, cfg: SandboxConfig, variables: Mapping[str, str], closed: threading.Event
    ) -> None:
        """`table` is the configuration's that `cfg` is in; once `closed` is set, no answer is waited for."""
        self._table, self._cfg, self._closed = table, cfg, closed
        self._folder = None if cfg.mode == "off" else HeldFolder()
        self.sandbox = _limits(table, cfg, self._folder)
        places = {} if self._folder is None else {"HOME": self._folder.path, "TMPDIR": self._folder.path}
        output = None if self._folder is None else subprocess.DEVNULL
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._looks = {event: select.poll() for event in (select.POLLIN, select.POLLOUT)}
        for event, look in self._looks.items():
            look.register(self.socket, event)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", program, str(os.getpid()), str(theirs.fileno()), *_import_path()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**variables, **places},
                start_new_session=True,  # keeps a terminal's Ctrl-C away, and lets us kill it with its children
            )

    def load(self, job: object, read: Callable[[Any], T]) -> T:
        """Send the first message, which says what to load, and return the answer as read.

        Raises UserError if the process answers with a `problem`, or not at all.
        """

        hint = sandbox_hint(self._table, self._cfg)
        try:
            answer = self.exchange(job, START_LIMIT_S, lambda answer: answer)
            if not (isinstance(answer, dict) and isinstance(problem := answer.get("problem"), str)):
                return read(answer)
        except (NoAnswer, ValueError) as reason:
            self.kill()
            raise UserError(f"the {self._table} cannot be loaded{hint}: {reason}") from reason
        self.kill()
        where = hint if "\n" in problem else ""  # a traceback: the user's code has failed
        raise UserError(f"the {self._table} cannot be loaded{where}: {lines(problem)}".rstrip())

    def is_ready(self) -> bool:
        """True when the process can be asked. An idle one sends nothing: if there is input, it has ended."""
        return self._process.returncode is None and not self._looks[select.POLLIN].poll(0)

    def exchange(self, message: object, limit_s: float, read: Callable[[Any], T]) -> T:
        """Send a message and `read` the answer, which is parsed JSON. Returns or raises NoAnswer within the limit.

        `read` raises ValueError for an invalid answer.
        """
        if self._closed.is_set():
            raise NoAnswer("closed")
        content = framed(message)
        deadline = time.monotonic() + limit_s
        try:
            self._send(content, deadline)
            return read(json.loads(self._receive_line(deadline)))
        except TimeoutError:
            self.kill()
            raise NoAnswer("closed" if self._closed.is_set() else "timeout") from None
        except (EOFError, OSError):
            raise NoAnswer(f"the worker {self.end()}") from None
        except (ValueError, RecursionError):
            self.kill()
            raise NoAnswer(INVALID_ANSWER) from None

    def end(self) -> str:
        """Wait a moment for a process that is ending by itself, then kill it; returns how it ended."""
        deadline = time.monotonic() + _END_S
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(_END_S / 1000)
        return self.kill()

    def kill(self) -> str:
        """Kill the process and those it started; returns how it ended."""
        # Its id cannot belong to another process before `wait` has collected it.
        if self._process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.terminate()  # the guard's signal to end it all: see sandbox.py
                self._process.wait(_END_S)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: when it is already gone
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.socket.close()
        if self._folder is not None:
            self._folder.remove()
        number = -code if code < 0 else code - 128  # the sandbox reports a signal as a shell does
        if number in set(signal.Signals):
            return f"was killed by {signal.Signals(number).name}"
        return f"exited with code {code}"

    def _send(self, content: bytes, deadline: float) -> None:
        """Write to the process. Raises TimeoutError at the deadline, or when the pool is closed."""
        left = memoryview(content)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)

    def _receive_line(self, deadline: float) -> bytes:
        """Read a line from the process. Raises TimeoutError at the deadline, or when the pool is closed."""
        received = b""
        while not received.endswith(b"\n"):
            self._wait(select.POLLIN, deadline)
            part = self.socket.recv(_READ_BYTES)
            if not part:
                raise EOFError
            received += part
            if len(received) > _MAX_ANSWER_BYTES:
                raise ValueError(INVALID_ANSWER)
        return received

    def _wait(self, event: int, deadline: float) -> None:
        """Wait until the socket can be read or written. Raises TimeoutError as `exchange` needs it."""
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._closed.is_set():
                raise TimeoutError
            if self._looks[event].poll(min(left_s, _POLL_S) * 1000):
                return


def unprotected_in(answer: Any) -> list[str]:
    """Read what a process says that its sandbox cannot protect. Raises ValueError if it says something else."""
    match answer:
        case {"unprotected": list(sentences)} if all(isinstance(sentence, str) for sentence in sentences):
            return list(map(one_line, sentences))
    raise ValueError(INVALID_ANSWER)


def framed(message: object) -> bytes:
    """Return a message as a process reads it. Raises whatever pickle does."""
    content = pickle.dumps(message)
    return SIZE.pack(len(content)) + content


def process_variables(cfg: SandboxConfig) -> dict[str, str]:
    """Return the environment variables of the processes to start.

    Take them once: while another thread restarts an engine, os.environ holds variables that are meant for the engine.
    """
    if cfg.mode == "off":
        return {**os.environ, **_ONE_THREAD}
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ONE_THREAD


def sandbox_hint(table: str, cfg: SandboxConfig) -> str:
    """Say what the user's code may miss in a sandbox; empty without one."""
    if cfg.mode == "off":
        return ""
    return f" (in a sandbox, without network, environment variables and files to write: see {table}.sandbox)"


def _limits(table: str, cfg: SandboxConfig, folder: HeldFolder | None) -> Sandbox | None:
    if folder is None:
        return None
    return Sandbox(
        setting=f"{table}.sandbox",
        folder=folder.path,
        is_strict=cfg.mode == "strict",
        max_memory_bytes=round(cfg.max_memory_gib * 2**30),
        max_processes=cfg.max_processes,
        max_file_bytes=round(cfg.max_file_gib * 2**30),
        max_open_files=cfg.max_open_files,
    )


def _import_path() -> list[str]:
    """Return `sys.path` with absolute paths, which do not depend on the process's directory."""
    return [os.path.abspath(place) for place in sys.path]
