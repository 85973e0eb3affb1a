"""The reward pool: computes rewards in processes that can be killed, with a time limit; failures are values."""

from __future__ import annotations

import queue
import textwrap
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spmdrl.config import RewardConfig, RewardTerm, SandboxConfig
from spmdrl.faults.text import lines, of_error, one_line
from spmdrl.rewards.item import RewardItem
from spmdrl.rewards.worker import PROGRAM, Job, Reply, Term
from spmdrl.types import RewardOutcome, UserError
from spmdrl.workers.channel import bounded
from spmdrl.workers.folders import sweep
from spmdrl.workers.process import (
    INVALID_ANSWER,
    START_LIMIT_S,
    NoAnswer,
    WorkerProcess,
    all_loaded,
    process_variables,
    sandbox_hint,
    unprotected_in,
)


class RewardPool:
    """Computes rewards in `reward.num_workers` processes.

    An exception, a timeout, a dead worker or a value that is no number within bounds gives reward 0 and a `failure`;
    none of them raises. UserError if the verifiers cannot be loaded. Close it, or use it in a `with` statement.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        self._terms = _named(cfg)
        self._weights = {term.name: written.weight for term, written in zip(self._terms, cfg.terms, strict=True)}
        self._timeout_s = cfg.timeout_s
        self._sandbox = cfg.sandbox
        self.unprotected: list[str] = []  # what the sandbox of the workers cannot stop on this machine
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._variables = process_variables(cfg.sandbox)
        sweep()
        started: list[Future[list[str]]] = [Future() for _ in range(cfg.num_workers)]
        # One thread per worker: Linux's parent-death signal arrives when the thread that started the worker ends.
        self._threads = [
            threading.Thread(target=self._serve, args=(future,), name="reward", daemon=True) for future in started
        ]
        for thread in self._threads:
            thread.start()
        try:
            *_, self.unprotected = all_loaded(started, "reward.terms", cfg.terms, limit_s=START_LIMIT_S)
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
            where = f"on a first sample{sandbox_hint('reward', self._sandbox)}"
            how = textwrap.indent(task.traceback, "    ", lambda line: True)
            raise UserError(f"the reward failed {where}: {outcome.failure}\n{how}".rstrip())
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
                reply = Reply(parts={}, failure=of_error(error))
            task.traceback = lines(reply.traceback)
            task.outcome.set_result(self._weigh(reply))
        worker.kill()

    def _start_worker(self) -> _Worker:
        return _Worker(self._terms, self._timeout_s, self._sandbox, self._closed, self._variables)

    def _weigh(self, reply: Reply) -> RewardOutcome:
        if reply.failure is not None:
            return RewardOutcome(reward=0.0, parts={}, failure=one_line(reply.failure))
        reward = sum(self._weights[name] * part for name, part in reply.parts.items())
        try:
            return RewardOutcome(reward=bounded("the weighted sum of the terms", reward), parts=reply.parts)
        except ValueError as error:
            return RewardOutcome(reward=0.0, parts=reply.parts, failure=str(error))


@dataclass
class _Task:
    """An item in the pool and its future reward."""

    item: RewardItem
    outcome: Future[RewardOutcome] = field(default_factory=Future)
    traceback: str = ""  # set before the outcome


class _Worker:
    """One reward process, seen from the thread that owns it."""

    def __init__(
        self,
        terms: Sequence[Term],
        limit_s: float,
        sandbox: SandboxConfig,
        closed: threading.Event,
        variables: Mapping[str, str],
    ) -> None:
        self._limit_s = limit_s
        self._names = {term.name for term in terms}
        self._process = WorkerProcess(PROGRAM, "reward", sandbox, variables, closed)
        job = Job(terms=list(terms), limit_s=limit_s, sandbox=self._process.sandbox)
        self.unprotected = self._process.load(job, unprotected_in)
        self.is_ready, self.kill = self._process.is_ready, self._process.kill

    def ask(self, item: RewardItem) -> Reply:
        """Send an item and return the worker's reply; without one, the worker is dead and the reply says why."""
        try:
            return self._process.exchange(item, self._limit_s, self._reply)
        except NoAnswer as reason:
            return Reply(parts={}, failure=str(reason))

    def _reply(self, answer: Any) -> Reply:
        """Convert an answer to a reply. Raises ValueError if it is invalid."""
        match answer:
            case {"parts": dict(parts), "failure": str(failure), "traceback": str(traceback)} if not parts:
                return Reply(parts={}, failure=failure, traceback=traceback)
            case {"parts": dict(parts), "failure": None, "traceback": ""} if parts.keys() == self._names:
                if all(isinstance(part, float) for part in parts.values()):
                    return Reply(parts={name: bounded(name, part) for name, part in parts.items()})
        raise ValueError(INVALID_ANSWER)


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
