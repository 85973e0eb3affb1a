"""Processes that run one program: started, asked within time limits, killed, started again, and closed.

Each process has a thread of the rank's that owns it. Users open a `Session`, of which a process may have many;
a process that dies is started again at the next request, and its sessions repeat what the new one must be asked.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from spmdrl.config import SandboxConfig
from spmdrl.config.base import Section
from spmdrl.faults.text import lines, of_error, one_line
from spmdrl.faults.verdict import print_once_per_node
from spmdrl.types import UserError
from spmdrl.workers.channel import PING, SIZE
from spmdrl.workers.folders import sweep
from spmdrl.workers.process import WorkerProcess, process_variables, sandbox_hint
from spmdrl.workers.sandbox import Sandbox

INVALID_ANSWER = "its answer is invalid"
START_LIMIT_S = 300.0  # to import the user's code and its packages
ANNOUNCE_AFTER_S = 10.0  # a longer wait for processes that load
_PING_LIMIT_S = 1.0  # for a process that reads to say so
_READ_BYTES = 2**18
_MAX_PAUSES = 1000
_NOT_ANNOUNCED = {"params", "args", "weight"}  # settings

LoadedT = TypeVar("LoadedT")
FailureKind = Literal["timeout", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgram(Generic[LoadedT]):
    """A program of `channel.program`, what it is started with, and the limits of its requests."""

    code: str
    table: str  # of the configuration
    setting: str  # what the process loads: its name
    sections: Sequence[Section]  # and its tables
    sandbox: SandboxConfig
    job: Callable[[Sandbox | None], object]  # the first message
    loaded: Callable[[Any], LoadedT]  # reads the answer to it; raises ValueError for an invalid one
    name: str  # of a process, in messages
    limit_s: float  # of a request
    too_late: str  # the reason why a request past its limit has failed
    max_answer_bytes: int
    max_deaths: int  # a request fails if it was alone in the process at the last of this number of deaths
    max_sessions: int | None = None  # of a process; with 1, requests and answers have no number
    has_time_to_close: bool = False  # a moment to end by itself, when the pool is closed


class Session(Protocol):
    """A user of a process, which it asks one thing at a time. The thread that owns the process calls the methods."""

    worker: Worker[Any] | None = None
    is_in_process: bool = False  # the process has had a request of it
    num_deaths: int = 0  # of processes that were at the present request

    @property
    def is_replaying(self) -> bool:
        """True while requests repeat what an earlier process has answered."""
        return False

    @property
    def is_finished(self) -> bool:
        """True when nothing will be asked any more."""

    def request(self, number: int) -> object | None:
        """Return the next request to the process, under this number; None if there is none."""

    def take(self, request: Any, answer: Any) -> None:
        """Take the answer to a request. Raises ValueError, KeyError or TypeError if the process must end for it."""

    def fail(self, kind: FailureKind, reason: str) -> None:
        """Give up what is asked, now and later."""

    def close(self) -> None:
        """End the session. What is asked fails with the reason "closed"."""

    def leave(self, *, died_idle: bool, how: str) -> None:
        """Prepare for a new process. `died_idle` says that nothing was asked when the old one died."""
        self.is_in_process = False


class WorkerPool(Generic[LoadedT]):
    """The processes of a program. UserError if it cannot be loaded. Close it."""

    def __init__(self, program: WorkerProgram[LoadedT], num_workers: int) -> None:
        sweep()
        self._max_sessions = program.max_sessions
        self._lock = threading.Lock()  # of the numbers of sessions, and of those that wait
        self._waiting: deque[Session] = deque()
        self.is_closed = False
        variables = process_variables(program.sandbox)
        self._workers = [Worker(program, variables) for _ in range(num_workers)]
        try:
            starts = [worker.loaded for worker in self._workers]
            *_, self.loaded = all_loaded(starts, program.setting, program.sections, limit_s=START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def open(self, session: Session) -> None:
        """Give a session to the process that has fewest; where all have their most, it waits for a `release`."""
        with self._lock:
            worker = min(self._workers, key=lambda worker: worker.num_sessions)
            if worker.num_sessions == self._max_sessions and not self.is_closed:
                self._waiting.append(session)
                return
            worker.num_sessions += 1
            session.worker = worker
        worker.post(session)

    def release(self, session: Session) -> None:
        """Give the room of a session to the first that waits. Call it once, from any thread."""
        worker = session.worker
        if worker is None:  # it still waits: the pool is being closed
            return
        with self._lock:
            if not self._waiting:
                worker.num_sessions -= 1
                return
            following = self._waiting.popleft()
            following.worker = worker
        worker.post(following)

    def close(self) -> None:
        """End the processes. What is asked fails with the reason "closed"; a second call does nothing."""
        with self._lock:
            self.is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join()
        for session in waiting:
            session.close()


def all_loaded(
    started: Sequence[Future[LoadedT]], setting: str, sections: Sequence[Section], *, limit_s: float
) -> list[LoadedT]:
    """Wait for processes to load what a setting's sections name; returns their answers, or raises what they raise.

    A wait of more than `ANNOUNCE_AFTER_S` is announced once on the console. The limit is theirs, and only shown here.
    """
    if wait(started, ANNOUNCE_AFTER_S).not_done:
        what = one_line(" and ".join(map(_written, sections)))
        print_once_per_node(f"waiting for {setting} to be loaded: {what}; it is given up after {limit_s:g} s")
    return [future.result() for future in started]


def _written(section: Section) -> str:
    settings = section.model_dump(mode="json", exclude=_NOT_ANNOUNCED, exclude_defaults=True)
    return ", ".join(f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())


def unprotected_in(answer: Any) -> list[str]:
    """Read from a process's first answer what its sandbox cannot protect. Raises ValueError if that is not there."""
    match answer:
        case {"unprotected": list(sentences)} if all(isinstance(sentence, str) for sentence in sentences):
            return list(map(one_line, sentences))
    raise ValueError(INVALID_ANSWER)


@dataclass(slots=True)
class InFlightRequest:
    """A request that the process is at."""

    session: Session
    request: object
    deadline: float  # infinite while the clock is paused
    left_s: float = 0.0  # while the clock is paused
    num_pauses: int = 0

    @property
    def is_paused(self) -> bool:
        return math.isinf(self.deadline)

    def pause(self) -> None:
        """Stop the clock: the request waits for a thread. It stops `_MAX_PAUSES` times at most."""
        self.num_pauses += 1
        if not self.is_paused and self.num_pauses <= _MAX_PAUSES:
            self.left_s, self.deadline = self.deadline - time.monotonic(), math.inf

    def resume(self) -> None:
        """Let the clock run again."""
        if self.is_paused:
            self.deadline = time.monotonic() + self.left_s


class Worker(Generic[LoadedT]):
    """One process, the sessions in it, and the thread that owns both.

    A request past its time limit ends the process. A request may end it too: those that were in a process that died are
    asked again, each alone, and one that ends it then has failed. After a new start the other sessions are replayed.
    """

    def __init__(self, program: WorkerProgram[LoadedT], variables: dict[str, str]) -> None:
        self._program, self._variables = program, variables
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the commands, and of `_has_ended`
        self._commands: list[tuple[Session, Callable[[], None] | None]] = []
        self._has_ended = False
        self._sessions: dict[Session, None] = {}  # in the order in which they were opened
        self._changed: dict[Session, None] = {}  # those that may have a request
        self._in_flight: dict[int, InFlightRequest] = {}
        self._num_sent = PING
        self._pinged_until: float | None = None
        self._process: WorkerProcess | None = None
        self._loads_until: float | None = None  # while the process loads
        self._to_send, self._received = bytearray(), bytearray()
        self._wake, self._waker = os.pipe()
        for end in (self._wake, self._waker):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self.num_sessions = 0  # counted by the pool
        self.loaded: Future[LoadedT] = Future()
        # Linux's parent-death signal arrives when the thread that started the process ends.
        self._thread = threading.Thread(target=self._run, name=program.table, daemon=True)
        self._thread.start()

    def post(self, session: Session, command: Callable[[], None] | None = None) -> None:
        """Run a method of a session in the thread of its process; one that has ended closes the session."""
        with self._lock:
            if not self._has_ended:
                self._commands.append((session, command))
                if len(self._commands) == 1 and threading.get_ident() != self._thread.ident:
                    with contextlib.suppress(BlockingIOError):  # full: it will wake up
                        os.write(self._waker, b"\0")
                return
        session.close()
        if command is not None:
            command()

    def stop(self) -> None:
        """Start to end. What is asked fails with the reason "closed"."""
        self._closed.set()
        with self._lock:
            if not self._has_ended:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._waker, b"\0")

    def join(self) -> None:
        self._thread.join()

    # In the thread

    def _run(self) -> None:
        try:
            self._start()
            while not self._closed.is_set():
                self._run_commands()
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
            process.end() if self._program.has_time_to_close else process.kill()
        with self._lock:
            self._has_ended = True
            os.close(self._wake)
            os.close(self._waker)
        self._run_commands()
        for session in self._sessions:
            session.close()
        if not self.loaded.done():
            self.loaded.set_exception(self._load_error("closed"))

    # Starting

    def _start(self) -> None:
        """Start a process; its first message says what to load."""
        program = self._program
        self._process = WorkerProcess(program.code, program.table, program.sandbox, self._variables)
        self._poll.register(self._process.socket, select.POLLIN)
        self._to_send, self._received = bytearray(_framed(program.job(self._process.sandbox))), bytearray()
        self._loads_until = time.monotonic() + START_LIMIT_S

    def _take_loaded(self, answer: Any) -> None:
        """Take the answer to the first message. Raises ValueError for an invalid one."""
        if isinstance(answer, dict) and isinstance(problem := answer.get("problem"), str):
            self._not_loaded(lines(problem), is_sentence="\n" not in problem)
            return
        loaded = self._program.loaded(answer)
        self._loads_until = None
        if not self.loaded.done():
            self.loaded.set_result(loaded)

    def _not_loaded(self, problem: str, *, is_sentence: bool = False) -> None:
        """Kill a process that has not loaded. The first one that does not ends the worker."""
        if self._process is not None:
            self._forget_process().kill()
        error = self._load_error(problem, is_sentence=is_sentence)
        if not self.loaded.done():
            self.loaded.set_exception(error)
            self._closed.set()
        self._fail([session for session in self._sessions if session.request(0) is not None], "error", str(error))

    def _load_error(self, problem: str, *, is_sentence: bool = False) -> UserError:
        # A sentence of the process names the cause; else the code may miss something that the sandbox does not allow.
        hint = "" if is_sentence else sandbox_hint(self._program.table, self._program.sandbox)
        return UserError(f"the {self._program.table} cannot be loaded{hint}: {problem}".rstrip())

    # Requests

    def _run_commands(self) -> None:
        """Run the commands that have been posted."""
        if not self._commands:
            return
        with self._lock:
            commands, self._commands = self._commands, []
        for session, command in commands:
            self._sessions[session] = self._changed[session] = None
            if command is not None:
                command()
            if session.is_finished:
                del self._sessions[session]

    def _send_ready(self) -> None:
        """Send what may be sent: first what is replayed, then what was in a dying process, alone, then the rest."""
        if not self._changed or self._loads_until is not None or self._pinged_until is not None:
            return
        at_work = {sent.session for sent in self._in_flight.values()}
        if any(session.num_deaths for session in at_work):
            return
        ready = [session for session in self._changed if session not in at_work and session.request(0) is not None]
        suspects = [session for session in ready if session.num_deaths]
        self._changed = {}
        if suspects:
            self._changed = dict.fromkeys(ready)  # they are checked again after the suspects
            ready = [session for session in ready if session.is_replaying and not session.num_deaths]
            if not ready and not at_work:
                ready = suspects[:1]
        if not ready:
            return
        if self._process is not None and self._program.max_sessions == 1 and self._process.has_input():
            self._changed.update(dict.fromkeys(ready))  # it has died, or sends what nobody has asked for
            return
        if self._process is None:
            self._changed.update(dict.fromkeys(ready))
            try:
                self._start()
            except OSError as error:
                self._fail(ready, "error", of_error(error))
            return
        for session in ready:
            self._send(session)

    def _send(self, session: Session) -> None:
        self._num_sent += 1
        request = session.request(self._num_sent)
        try:
            content = _framed(request)
        except Exception as error:  # metadata may hold what cannot be pickled
            self._fail([session], "error", of_error(error))
            return
        session.is_in_process = True
        self._in_flight[self._num_sent] = InFlightRequest(session, request, time.monotonic() + self._program.limit_s)
        self._to_send += content

    def _fail(self, sessions: Iterable[Session], kind: FailureKind, reason: str) -> None:
        for session in sessions:
            session.fail(kind, reason)
            if session.is_finished:
                self._sessions.pop(session, None)

    def _wait(self) -> None:
        """Wait for commands, answers or the next deadline, and take them."""
        process = self._process
        if process is not None and self._to_send:
            try:
                del self._to_send[: process.socket.send(self._to_send)]
            except BlockingIOError:
                pass
            except OSError:  # it has ended
                self._on_death()
                return
        if process is not None:
            self._poll.register(process.socket, select.POLLIN | (select.POLLOUT if self._to_send else 0))
        ready = dict(self._poll.poll(self._left_ms()))
        if self._wake in ready:
            os.read(self._wake, _READ_BYTES)
        if process is not None and ready.get(process.socket.fileno(), 0) & ~select.POLLOUT:
            self._read(process)

    def _left_ms(self) -> float | None:
        """Return the milliseconds until something must be done; None if nothing must."""
        if self._commands:  # of this thread's own
            return 0.0
        deadlines = [sent.deadline for sent in self._in_flight.values()]
        sooner = [limit for limit in (self._pinged_until, self._loads_until) if limit is not None]
        first = min(sooner or deadlines, default=math.inf)
        return None if math.isinf(first) else max(0.0, first - time.monotonic()) * 1000

    def _read(self, process: WorkerProcess) -> None:
        """Read what has arrived. A process that has ended is lost, and so is one that sends what it should not."""
        try:
            if not (part := process.socket.recv(_READ_BYTES)):
                raise EOFError
            self._received += part
            if b"\n" in part:
                *answers, self._received = self._received.split(b"\n")
                for answer in answers:
                    self._take(json.loads(answer))
                    if self._process is None:
                        return
            if len(self._received) > self._program.max_answer_bytes:
                raise ValueError(INVALID_ANSWER)
        except (EOFError, OSError):
            self._on_death()
        except (ValueError, KeyError, TypeError, RecursionError):
            self._on_death(INVALID_ANSWER)

    def _take(self, answer: Any) -> None:
        """Take one answer. Raises ValueError, KeyError or TypeError for one that a process should not send."""
        if self._loads_until is not None:
            self._take_loaded(answer)
            return
        number = answer["number"] if self._program.max_sessions != 1 else next(iter(self._in_flight), -1)
        if number == PING:
            self._pinged_until = None
            self._end_late()
            return
        sent = self._in_flight[number]
        if "waits" in answer:
            sent.pause() if answer["waits"] else sent.resume()
            return
        session = sent.session
        session.take(sent.request, answer)
        del self._in_flight[number]
        self._changed[session] = None
        if session.is_finished:
            del self._sessions[session], self._changed[session]

    # Time limits and deaths

    def _check_clocks(self) -> None:
        """Find requests past their time limit; if there are, make sure that they themselves take so long.

        Code that never gives the loop back delays all others: then each of them is asked again, alone.
        """
        now = time.monotonic()
        if self._loads_until is not None:
            if self._loads_until <= now:
                self._not_loaded("timeout")
            return
        if all(sent.is_paused for sent in self._in_flight.values()):  # for threads that none of them will give back
            for sent in self._in_flight.values():
                sent.resume()
        if not any(sent.deadline <= now for sent in self._in_flight.values()):
            return
        if len(self._in_flight) == 1:
            self._end_late()
        elif self._pinged_until is None:
            self._to_send += _framed(PING)
            self._pinged_until = now + min(_PING_LIMIT_S, self._program.limit_s)
        elif self._pinged_until <= now:
            self._on_death("it did not read")

    def _end_late(self) -> None:
        """Fail what is past its time limit, and end the process for it."""
        now = time.monotonic()
        late = [sent.session for sent in self._in_flight.values() if sent.deadline <= now]
        if late:
            # The process ends first: a session that fails may let another one in.
            self._forget_process().kill()
            self._fail(late, "timeout", self._program.too_late)
            self._reset_sessions(died_idle=False, how="")

    def _on_death(self, reason: str | None = None) -> None:
        """Take note that the process has died, or kill it for a reason, and of the sessions that were in it."""
        is_loading = self._loads_until is not None
        present = [sent.session for sent in self._in_flight.values()]
        process = self._forget_process()
        how = process.end() if reason is None else f"was killed: {reason}"
        process.kill()
        if is_loading:
            self._not_loaded(f"the worker {how}")
            return
        for session in present:
            session.num_deaths += 1
        if len(present) == 1 and present[0].num_deaths >= self._program.max_deaths:
            self._fail(present, "error", f"{self._program.name} {how}")
        self._reset_sessions(died_idle=not present, how=how)

    def _reset_sessions(self, *, died_idle: bool, how: str) -> None:
        """Prepare all sessions for a new process."""
        for session in self._sessions:
            session.leave(died_idle=died_idle, how=how)
        self._sessions = {session: None for session in self._sessions if not session.is_finished}
        self._changed = dict(self._sessions)

    def _forget_process(self) -> WorkerProcess:
        process = self._process
        assert process is not None, "only a process that was started ends"
        self._poll.unregister(process.socket)
        self._process, self._pinged_until, self._loads_until = None, None, None
        self._in_flight.clear()
        return process


def _framed(message: object) -> bytes:
    """Return a message as a process reads it. Raises whatever pickle does."""
    content = pickle.dumps(message)
    return SIZE.pack(len(content)) + content
