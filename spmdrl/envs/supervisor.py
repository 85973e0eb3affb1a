"""The thread that owns one environment process: it asks, keeps the clocks, and starts the process again."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from spmdrl.config import EnvironmentConfig
from spmdrl.envs.observations import from_json, max_answer_bytes
from spmdrl.envs.protocol import Close, EnvironmentFailure, Job, Loaded, MetricNames, Ping
from spmdrl.envs.session import EnvSession, InFlightRequest
from spmdrl.envs.worker import PROGRAM
from spmdrl.faults.text import of_error
from spmdrl.types import UserError
from spmdrl.workers.process import INVALID_ANSWER, WorkerProcess, framed, unprotected_in

_PING_LIMIT_S = 1.0  # for a process that reads to say so
_PING = 0  # its number; requests have higher ones
_READ_BYTES = 2**18
_THREADS_WITHOUT_SANDBOX = 64


class EnvWorkerSupervisor:
    """Owns one process and the environments in it.

    A request past its time limit ends the process. So may a request: who was in a process that died is asked again,
    alone, and who kills it then has failed. After a new start the other environments are played again.
    """

    def __init__(self, cfg: EnvironmentConfig, variables: Mapping[str, str], names: MetricNames) -> None:
        self._cfg, self._variables, self._names = cfg, variables, names
        self._limit_s = cfg.step_timeout_s
        self._max_line_bytes = max_answer_bytes(cfg.max_observation_characters)
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the commands, and of `_has_ended`
        self._commands: list[tuple[EnvSession, Callable[[], None]]] = []
        self._has_ended = False
        self._held: dict[EnvSession, None] = {}  # in the order in which they were opened
        self._changed: dict[EnvSession, None] = {}  # those that may have a request
        self._in_flight: dict[int, InFlightRequest] = {}
        self._num_sent = _PING
        self._pinged_until: float | None = None
        self._process: WorkerProcess | None = None
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self.num_open = 0  # counted by the client
        self.loaded: Future[Loaded] = Future()
        # Linux's parent-death signal arrives when the thread that started the process ends.
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def post(self, held: EnvSession, command: Callable[[], None]) -> None:
        """Run a method of an environment in the thread of its process; one that has ended fails it."""
        with self._lock:
            if not self._has_ended:
                self._commands.append((held, command))
                if len(self._commands) == 1:  # else it has been woken and has not looked yet
                    with contextlib.suppress(BlockingIOError):  # full: it will wake up
                        os.write(self._waker, b"\0")
                return
        held.close()
        command()

    def stop(self) -> None:
        """Begin to end: the process has a moment to close its environments. What is asked gets the failure "closed"."""
        self._closed.set()
        with self._lock:
            if not self._has_ended:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._waker, b"\0")

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    # In the thread

    def _run(self) -> None:
        try:
            self.loaded.set_result(self._start())
            while not self._closed.is_set():
                self._send_ready()
                self._wait()
                self._check_clocks()
        except Exception as error:
            if self.loaded.done():
                raise
            self.loaded.set_exception(error)
        finally:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            process = self._forget_process()
            with contextlib.suppress(OSError):  # it has ended by itself
                process.socket.shutdown(socket.SHUT_WR)
            process.end()
        self._selector.close()
        with self._lock:
            self._has_ended = True
            os.close(self._wake)
            os.close(self._waker)
        self._obey()
        for held in self._held:
            held.close()

    def _start(self) -> Loaded:
        """Start a process. Raises UserError if the source cannot be loaded."""
        cfg = self._cfg
        process = WorkerProcess(PROGRAM, "environment", cfg.sandbox, self._variables, self._closed)
        settings = cfg.source.model_dump()
        job = Job(
            kind=settings.pop("kind"),
            settings=settings,
            sandbox=process.sandbox,
            # The other half is for the programs that tools start.
            max_threads=max(1, cfg.sandbox.max_processes // 2) if process.sandbox else _THREADS_WITHOUT_SANDBOX,
            max_characters=cfg.max_observation_characters,
        )
        loaded = process.load(job, _loaded)
        self._selector.register(process.socket, selectors.EVENT_READ)
        self._to_send, self._received = bytearray(), bytearray()
        self._process = process
        return loaded

    def _obey(self) -> None:
        """Run the commands that have been posted."""
        with self._lock:
            commands, self._commands = self._commands, []
        for held, command in commands:
            self._held[held] = self._changed[held] = None
            command()
            if held.is_closed and not held.is_in_process:
                del self._held[held]

    def _send_ready(self) -> None:
        """Send what may be sent: first what is played again, then what was in a dying process, alone, then the rest."""
        at_work = {sent.held for sent in self._in_flight.values()}
        if self._pinged_until is not None or any(held.num_deaths for held in at_work):
            return
        ready = [held for held in self._changed if held not in at_work and held.has_request]
        suspects = [held for held in ready if held.num_deaths]
        self._changed = {}
        if suspects:
            self._changed = dict.fromkeys(ready)  # they are looked at again after the suspects
            ready = [held for held in ready if held.is_replaying and not held.num_deaths]
            if not ready and not at_work:
                ready = suspects[:1]
        if ready and self._process is None:
            try:
                self._start()
            except UserError as error:
                reason = "closed" if self._closed.is_set() else str(error)
                _fail(ready, EnvironmentFailure(kind="error", reason=reason))
                return
        for held in ready:
            self._send(held)

    def _send(self, held: EnvSession) -> None:
        self._num_sent += 1
        request = held.request(self._num_sent)
        try:
            content = framed(request)
        except Exception as error:  # a start's metadata may hold what cannot be pickled
            _fail([held], EnvironmentFailure(kind="error", reason=of_error(error)))
            return
        held.is_in_process = True
        closes = isinstance(request, Close)
        self._in_flight[self._num_sent] = InFlightRequest(held, closes, time.monotonic() + self._limit_s, self._limit_s)
        self._to_send += content

    def _wait(self) -> None:
        """Wait for commands, answers or the next deadline, and take them."""
        process = self._process
        if process is not None:
            self._selector.modify(
                process.socket, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._to_send else 0)
            )
        ready = {key.fileobj: events for key, events in self._selector.select(self._left_s())}
        if self._wake in ready:
            os.read(self._wake, _READ_BYTES)
            self._obey()
        if process is not None:
            self._exchange(process, ready.get(process.socket, 0))

    def _left_s(self) -> float | None:
        """Return the seconds until a clock must be looked at; None if there is none."""
        deadlines = [sent.deadline for sent in self._in_flight.values()]
        first = min(deadlines if self._pinged_until is None else [self._pinged_until], default=math.inf)
        return None if math.isinf(first) else max(0.0, first - time.monotonic())

    def _exchange(self, process: WorkerProcess, events: int) -> None:
        """Write to the process and read from it, as far as both go."""
        try:
            if events & selectors.EVENT_WRITE:
                del self._to_send[: process.socket.send(self._to_send)]
            if events & selectors.EVENT_READ:
                self._read(process)
        except (EOFError, OSError):
            self._lose()
        except (ValueError, KeyError, TypeError, RecursionError):
            self._lose(f"was killed: {INVALID_ANSWER}")

    def _read(self, process: WorkerProcess) -> None:
        """Read what has arrived.

        Raises EOFError if the process has ended; ValueError, KeyError, TypeError or RecursionError if it sends what it
        should not.
        """
        part = process.socket.recv(_READ_BYTES)
        if not part:
            raise EOFError
        self._received += part
        if b"\n" in part:
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                self._take(json.loads(line))
                if self._process is None:
                    return
        if len(self._received) > self._max_line_bytes:
            raise ValueError(INVALID_ANSWER)

    def _take(self, answer: Any) -> None:
        """Take one answer. Raises as `_read` does."""
        number = answer["number"]
        if number == _PING:
            self._pinged_until = None
            self._end_late()
            return
        sent = self._in_flight[number]
        if "waits" in answer:
            sent.hold() if answer["waits"] else sent.go_on()
            return
        held = sent.held
        if not sent.closes and "observation" not in answer:
            reason, traceback = (_text(answer[name]) for name in ("failure", "traceback"))
            held.fail(EnvironmentFailure(kind="error", reason=reason, traceback=traceback))
        del self._in_flight[number]
        self._changed[held] = None
        if sent.closes:
            held.is_in_process = False
            del self._held[held]
        elif "observation" in answer:
            try:
                observation = from_json(answer["observation"], self._cfg.max_observation_characters)
                held.take(self._names.kept(observation))
            except ValueError as error:
                held.fail(EnvironmentFailure(kind="error", reason=f"{INVALID_ANSWER}: {error}"))

    def _check_clocks(self) -> None:
        """Look for requests past their time limit; if there are, make sure that they themselves take so long.

        Code that never gives the loop back holds up all others: then each of them is asked again, alone.
        """
        if all(sent.waits for sent in self._in_flight.values()):  # for threads that none of them will give back
            for sent in self._in_flight.values():
                sent.go_on()
        now = time.monotonic()
        if not any(sent.deadline <= now for sent in self._in_flight.values()):
            return
        if len(self._in_flight) == 1:
            self._end_late()
        elif self._pinged_until is None:
            self._to_send += framed(Ping(number=_PING))
            self._pinged_until = now + min(_PING_LIMIT_S, self._limit_s)
        elif self._pinged_until <= now:
            self._lose("was killed: it did not read")

    def _end_late(self) -> None:
        """Fail what is past its time limit, and end the process for it."""
        now = time.monotonic()
        late = [sent.held for sent in self._in_flight.values() if sent.deadline <= now]
        if late:
            reason = f"no answer within environment.step_timeout_s = {self._limit_s:g} seconds"
            _fail(late, EnvironmentFailure(kind="timeout", reason=reason))
            self._forget_process().kill()
            self._leave(died_idle=False, how="")

    def _lose(self, reason: str | None = None) -> None:
        """Take note that the process has died, or kill it for a reason, and of who was in it."""
        present = [sent.held for sent in self._in_flight.values()]
        process = self._forget_process()
        ended = process.end() if reason is None else process.kill()
        how = reason or ended
        for held in present:
            held.num_deaths += 1
        if len(present) == 1 and present[0].num_deaths > 1:
            _fail(present, EnvironmentFailure(kind="error", reason=f"the environment's process {how}"))
        self._leave(died_idle=not present, how=how)

    def _leave(self, *, died_idle: bool, how: str) -> None:
        """Prepare all environments for a new process."""
        for held in self._held:
            held.leave(died_idle=died_idle, how=how)
        self._held = {held: None for held in self._held if not held.is_closed}
        self._changed = dict(self._held)

    def _forget_process(self) -> WorkerProcess:
        process = self._process
        assert process is not None, "only a process that was started ends"
        self._selector.unregister(process.socket)
        self._process, self._pinged_until = None, None
        self._in_flight.clear()
        return process


def _fail(held: Iterable[EnvSession], failure: EnvironmentFailure) -> None:
    for each in held:
        each.fail(failure)


def _text(value: Any) -> str:
    """Read a text that may be anything. Raises ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(INVALID_ANSWER)
    return value


def _loaded(answer: Any) -> Loaded:
    match answer:
        case {"tools": list(tools)} if all(isinstance(tool, dict) for tool in tools):
            return Loaded(tools=tools, unprotected=unprotected_in(answer))
    raise ValueError(INVALID_ANSWER)
