"""The reward pool: items are scored in processes that can be killed, under a time limit; failures are values."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spmdrl.config import FunctionReward, RewardConfig, RewardTerm
from spmdrl.rewards.item import RewardItem
from spmdrl.rewards.worker import PROGRAM, Reply, Term
from spmdrl.types import RewardOutcome, UserError

START_LIMIT_S = 300.0  # to import the verifiers
_POLL_S = 0.1  # how soon a busy worker's thread sees that the scorer was closed
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Scorer:
    """Scores rollouts in `reward.num_workers` processes.

    An exception, a time-out, a dead worker or a value that is no number gives reward 0 with its `failure` named; it
    never raises. UserError when the verifiers cannot be loaded. Close it, or use it in a `with` statement.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self._terms = _named(cfg.terms)
        self._weights = {term.name: written.weight for term, written in zip(self._terms, cfg.terms, strict=True)}
        self._timeout_s = cfg.timeout_s
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        # As it is now: while an engine is started again, in another thread, it holds what is meant for the engine.
        self._environment = os.environ | _ONE_THREAD
        started: list[Future[None]] = [Future() for _ in range(cfg.num_workers)]
        # A worker lives as long as the thread that started it: Linux's parent-death signal is about threads.
        self._threads = [
            threading.Thread(target=self._serve, args=(future,), name="reward", daemon=True) for future in started
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in started:
                future.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def submit(self, item: RewardItem) -> Future[RewardOutcome]:
        """Start scoring one item; the future's result never raises."""
        return self._enqueue(item).outcome

    def score(self, items: Iterable[RewardItem]) -> list[RewardOutcome]:
        """Score items, in order."""
        return [future.result() for future in [self.submit(item) for item in items]]

    def check(self, item: RewardItem) -> RewardOutcome:
        """Score one item; UserError, with the verifier's traceback, when it fails."""
        task = self._enqueue(item)
        outcome = task.outcome.result()
        if outcome.failure == "timeout":
            raise UserError(
                f"the reward took more than reward.timeout_s = {self._timeout_s:g} seconds on a first sample"
            )
        if outcome.failure is not None:
            raise UserError(f"the reward failed on a first sample: {outcome.failure}\n{task.traceback}".rstrip())
        return outcome

    def close(self) -> None:
        """Kill the workers. What has no score yet gets the failure "closed"."""
        self._closed.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _enqueue(self, item: RewardItem) -> _Task:
        if self._closed.is_set():
            raise RuntimeError("this scorer is closed")
        task = _Task(item)
        self._tasks.put(task)
        return task

    def _serve(self, started: Future[None]) -> None:
        """The life of one thread: keep one worker, which nobody else touches, and hand it one item at a time."""
        try:
            worker = _Worker(self._terms, self._closed, self._environment)
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while (task := self._tasks.get()) is not None:
            try:
                if not worker.is_ready() and not self._closed.is_set():
                    worker.kill()
                    worker = _Worker(self._terms, self._closed, self._environment)
                reply = worker.ask(task.item, self._timeout_s)
            except Exception as error:  # the item cannot be pickled, or no worker can be started
                reply = Reply(parts={}, failure=f"{type(error).__name__}: {error}")
            task.traceback = reply.traceback
            task.outcome.set_result(self._weigh(reply))
        worker.kill()

    def _weigh(self, reply: Reply) -> RewardOutcome:
        if reply.failure is not None:
            return RewardOutcome(reward=0.0, parts={}, failure=reply.failure)
        reward = sum(self._weights[name] * part for name, part in reply.parts.items())
        if not math.isfinite(reward):
            return RewardOutcome(reward=0.0, parts=reply.parts, failure=f"the weighted sum of the terms is {reward}")
        return RewardOutcome(reward=reward, parts=reply.parts)


@dataclass
class _Task:
    """An item on its way through the pool."""

    item: RewardItem
    outcome: Future[RewardOutcome] = field(default_factory=Future)
    traceback: str = ""  # set before the outcome


class _Worker:
    """One reward process, seen from the thread that owns it."""

    def __init__(self, terms: Sequence[Term], closed: threading.Event, environment: Mapping[str, str]) -> None:
        self._closed = closed
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", PROGRAM, str(os.getpid()), str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C stays away, and its own children can be killed with it
            )
        problem = self.ask(list(terms), START_LIMIT_S)
        if problem is not None:
            self.kill()
            reason = problem.failure if isinstance(problem, Reply) else problem
            raise UserError(f"the reward cannot be loaded: {reason}")

    def is_ready(self) -> bool:
        """Whether it can take an item. An idle worker has nothing to say: what there is to read is its end."""
        return not self._connection.closed and not self._connection.poll()

    def ask(self, message: object, limit_s: float) -> Any:
        """Send something and receive the reply; a failed Reply when there is none, and then the worker is dead."""
        if self._closed.is_set():
            return Reply(parts={}, failure="closed")
        try:
            self._connection.send(message)
            if self._has_answered(limit_s):
                return self._connection.recv()
        except (EOFError, OSError):
            return Reply(parts={}, failure=f"the worker {self.kill()}")
        self.kill()
        return Reply(parts={}, failure="closed" if self._closed.is_set() else "timeout")

    def kill(self) -> str:
        """End the process and those it started; returns how it ended."""
        # Its id stays taken until `wait` has collected it, so no stranger is hit.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: when it is already gone
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._connection.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _has_answered(self, limit_s: float) -> bool:
        """Wait for the worker, the limit, or the end of the scorer."""
        deadline = time.monotonic() + limit_s
        while (left_s := deadline - time.monotonic()) > 0 and not self._closed.is_set():
            if self._connection.poll(min(left_s, _POLL_S)):
                return True
        return False


def _named(terms: Sequence[RewardTerm]) -> list[Term]:
    """Terms are named by their kind, the second of a kind with _2, and so on."""
    seen: Counter[str] = Counter()
    named = []
    for term in terms:
        seen[term.kind] += 1
        name = term.kind if seen[term.kind] == 1 else f"{term.kind}_{seen[term.kind]}"
        named.append(
            Term(name=name, kind=term.kind, function=term.function if isinstance(term, FunctionReward) else None)
        )
    return named
