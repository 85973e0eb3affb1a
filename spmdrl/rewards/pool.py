"""The reward pool: computes rewards in processes that can be killed, with a time limit; failures are values."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spmdrl.config import RewardConfig, RewardTerm, SandboxConfig
from spmdrl.rewards.folders import HeldFolder, sweep
from spmdrl.rewards.item import RewardItem
from spmdrl.rewards.sandbox import Sandbox
from spmdrl.rewards.worker import PROGRAM, SIZE, Job, Reply, Start, Term
from spmdrl.types import RewardOutcome, UserError

START_LIMIT_S = 300.0  # to import the verifiers
_POLL_S = 0.1  # how often a busy worker's thread checks whether the pool was closed
_END_S = 2.0  # for a process that has closed its socket to end
_MAX_ANSWER_BYTES = 2**20
_INVALID_ANSWER = "the worker's answer is invalid"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")  # the only environment variables in a sandbox

T = TypeVar("T")


class RewardPool:
    """Computes rewards in `reward.num_workers` processes.

    An exception, a timeout, a dead worker or a value that is not a number gives reward 0 and a `failure`; none of them
    raises. UserError if the verifiers cannot be loaded. Close it, or use it in a `with` statement.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self._terms = _named(cfg)
        self._weights = {term.name: written.weight for term, written in zip(self._terms, cfg.terms, strict=True)}
        self._timeout_s = cfg.timeout_s
        self._sandbox = cfg.sandbox
        self.unprotected: list[str] = []  # what the sandbox of the workers cannot stop on this machine
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        # A copy: while another thread restarts an engine, os.environ holds variables that are meant for the engine.
        self._environment = _environment(cfg.sandbox)
        sweep()
        started: list[Future[list[str]]] = [Future() for _ in range(cfg.num_workers)]
        # One thread per worker: Linux's parent-death signal arrives when the thread that started the worker ends.
        self._threads = [
            threading.Thread(target=self._serve, args=(future,), name="reward", daemon=True) for future in started
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in started:
                self.unprotected = future.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def submit(self, item: RewardItem) -> Future[RewardOutcome]:
        """Start to compute the reward of one item; the future's result never raises."""
        return self._enqueue(item).outcome

    def check(self, item: RewardItem) -> RewardOutcome:
        """Compute the reward of one item. Raises UserError with the verifier's traceback if that fails."""
        task = self._enqueue(item)
        outcome = task.outcome.result()
        if outcome.failure == "timeout":
            raise UserError(
                f"the reward took more than reward.timeout_s = {self._timeout_s:g} seconds on a first sample"
            )
        if outcome.failure is not None:
            where = f"on a first sample{_hint(self._sandbox)}"
            raise UserError(f"the reward failed {where}: {outcome.failure}\n{task.traceback}".rstrip())
        return outcome

    def close(self) -> None:
        """Kill the workers. Items without a reward get the failure "closed"."""
        self._closed.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _enqueue(self, item: RewardItem) -> _Task:
        if self._closed.is_set():
            raise RuntimeError("this reward pool is closed")
        task = _Task(item)
        self._tasks.put(task)
        return task

    def _serve(self, started: Future[list[str]]) -> None:
        """Run one thread: own one worker, and give it one item at a time."""
        try:
            worker = self._start_worker()
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(worker.unprotected)
        while (task := self._tasks.get()) is not None:
            try:
                if not worker.is_ready() and not self._closed.is_set():
                    worker.kill()
                    worker = self._start_worker()
                reply = worker.ask(task.item)
            except Exception as error:  # the item cannot be pickled, or no worker can be started
                reply = Reply(parts={}, failure=f"{type(error).__name__}: {error}")
            task.traceback = reply.traceback
            task.outcome.set_result(self._weigh(reply))
        worker.kill()

    def _start_worker(self) -> _Worker:
        return _Worker(self._terms, self._timeout_s, self._sandbox, self._closed, self._environment)

    def _weigh(self, reply: Reply) -> RewardOutcome:
        if reply.failure is not None:
            return RewardOutcome(reward=0.0, parts={}, failure=reply.failure)
        reward = sum(self._weights[name] * part for name, part in reply.parts.items())
        if not math.isfinite(reward):
            return RewardOutcome(reward=0.0, parts=reply.parts, failure=f"the weighted sum of the terms is {reward}")
        return RewardOutcome(reward=reward, parts=reply.parts)


@dataclass
class _Task:
    """An item in the pool and its future reward."""

    item: RewardItem
    outcome: Future[RewardOutcome] = field(default_factory=Future)
    traceback: str = ""  # set before the outcome


class _NoAnswer(Exception):
    """The reason why a worker has not answered; the worker is dead."""


class _Worker:
    """One reward process, seen from the thread that owns it."""

    def __init__(
        self,
        terms: Sequence[Term],
        limit_s: float,
        sandbox: SandboxConfig,
        closed: threading.Event,
        environment: Mapping[str, str],
    ) -> None:
        self._closed, self._limit_s = closed, limit_s
        self._names = {term.name for term in terms}
        self._folder = None if sandbox.mode == "off" else HeldFolder()
        places = {} if self._folder is None else {"HOME": self._folder.path, "TMPDIR": self._folder.path}
        output = None if self._folder is None else subprocess.DEVNULL
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", PROGRAM, str(os.getpid()), str(theirs.fileno()), *_import_path()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**environment, **places},
                start_new_session=True,  # keeps a terminal's Ctrl-C away, and lets us kill it with its children
            )
        job = Job(terms=list(terms), limit_s=limit_s, sandbox=_limits(sandbox, self._folder))
        try:
            start = self._exchange(job, START_LIMIT_S, _start)
        except _NoAnswer as reason:
            raise UserError(f"the reward cannot be loaded{_hint(sandbox)}: {reason}") from reason
        if start.problem is not None:
            self.kill()
            hint = _hint(sandbox) if "\n" in start.problem else ""  # a traceback: the user's code has failed
            raise UserError(f"the reward cannot be loaded{hint}: {start.problem}")
        self.unprotected = start.unprotected

    def is_ready(self) -> bool:
        """True when the worker can take an item. An idle worker sends nothing: if there is input, it has ended."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:  # it was killed
            return False
        return False

    def ask(self, item: RewardItem) -> Reply:
        """Send an item and return the worker's reply; without one, the worker is dead and the reply says why."""
        try:
            return self._exchange(item, self._limit_s, self._reply)
        except _NoAnswer as reason:
            return Reply(parts={}, failure=str(reason))

    def kill(self) -> str:
        """Kill the process and those it started; returns how it ended."""
        # Its id cannot belong to another process before `wait` has collected it.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: when it is already gone
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._socket.close()
        if self._folder is not None:
            self._folder.remove()
        number = -code if code < 0 else code - 128  # the sandbox reports a signal as a shell does
        if number in set(signal.Signals):
            return f"was killed by {signal.Signals(number).name}"
        return f"exited with code {code}"

    def _let_end(self) -> None:
        """Wait a moment for a process that has closed its socket, so that its own exit code is reported."""
        deadline = time.monotonic() + _END_S
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                return
            time.sleep(_END_S / 1000)

    def _exchange(self, message: object, limit_s: float, read: Callable[[Any], T]) -> T:
        """Send a message and `read` the answer, which is parsed JSON. This returns or raises within the limit."""
        if self._closed.is_set():
            raise _NoAnswer("closed")
        content = pickle.dumps(message)
        deadline = time.monotonic() + limit_s
        try:
            self._socket.settimeout(limit_s)
            self._socket.sendall(SIZE.pack(len(content)) + content)
            return read(json.loads(self._receive_line(deadline)))
        except TimeoutError:
            self.kill()
            raise _NoAnswer("closed" if self._closed.is_set() else "timeout") from None
        except (EOFError, OSError):
            self._let_end()
            raise _NoAnswer(f"the worker {self.kill()}") from None
        except (ValueError, RecursionError):
            self.kill()
            raise _NoAnswer(_INVALID_ANSWER) from None

    def _reply(self, answer: Any) -> Reply:
        """Convert an answer to a reply. Raises ValueError if it is invalid."""
        match answer:
            case {"parts": {}, "failure": str(failure), "traceback": str(traceback)}:
                return Reply(parts={}, failure=failure, traceback=traceback)
            case {"parts": dict(parts), "failure": None, "traceback": ""} if parts.keys() == self._names:
                if all(isinstance(part, float) and math.isfinite(part) for part in parts.values()):
                    return Reply(parts=parts)
        raise ValueError(_INVALID_ANSWER)

    def _receive_line(self, deadline: float) -> bytes:
        """Read a line from the worker. Raises TimeoutError at the deadline, or when the pool is closed."""
        received = b""
        while not received.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._closed.is_set():
                raise TimeoutError
            self._socket.settimeout(min(left_s, _POLL_S))
            with contextlib.suppress(TimeoutError):
                part = self._socket.recv(_MAX_ANSWER_BYTES)
                if not part:
                    raise EOFError
                received += part
            if len(received) > _MAX_ANSWER_BYTES:
                raise ValueError(_INVALID_ANSWER)
        return received


def _start(answer: Any) -> Start:
    match answer:
        case {"problem": None | str() as problem, "unprotected": list(unprotected)}:
            return Start(problem=problem, unprotected=unprotected)
    raise ValueError(_INVALID_ANSWER)


def _limits(cfg: SandboxConfig, folder: HeldFolder | None) -> Sandbox | None:
    if folder is None:
        return None
    return Sandbox(
        folder=folder.path,
        is_strict=cfg.mode == "strict",
        max_memory_bytes=round(cfg.max_memory_gib * 2**30),
        max_processes=cfg.max_processes,
        max_file_bytes=round(cfg.max_file_gib * 2**30),
        max_open_files=cfg.max_open_files,
    )


def _environment(cfg: SandboxConfig) -> dict[str, str]:
    if cfg.mode == "off":
        return {**os.environ, **_ONE_THREAD}
    return {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ} | _ONE_THREAD


def _hint(cfg: SandboxConfig) -> str:
    if cfg.mode == "off":
        return ""
    return " (in a sandbox, without network, environment variables and files to write: see reward.sandbox)"


def _import_path() -> list[str]:
    """Return `sys.path` with absolute paths, which do not depend on the worker's directory."""
    return [os.path.abspath(place) for place in sys.path]


def _named(cfg: RewardConfig) -> list[Term]:
    """Name terms by their kind; the second of a kind gets the suffix _2, and so on."""
    seen: Counter[str] = Counter()
    named = []
    for term in cfg.terms:
        seen[term.kind] += 1
        name = term.kind if seen[term.kind] == 1 else f"{term.kind}_{seen[term.kind]}"
        named.append(Term(name=name, kind=term.kind, settings=_settings(term)))
    return named


def _settings(term: RewardTerm) -> dict[str, Any]:
    """Return the arguments of the verifier's `load`: the settings that are special to its kind."""
    return {name: value for name, value in term.model_dump().items() if name not in ("kind", "weight")}
