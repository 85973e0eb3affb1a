"""An environment process: one loop that serves many environments, and never outlives the rank."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import importlib
import inspect
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import spmdrl
from spmdrl.conversation import Observation
from spmdrl.envs.observations import to_json
from spmdrl.envs.protocol import Close, Environment, EnvJob, EnvRequest, Maker, Reset
from spmdrl.faults.text import of_error
from spmdrl.workers.channel import PING, SIZE, connect, line, needs_package, program, receive
from spmdrl.workers.program import clear
from spmdrl.workers.sandbox import Isolation, continue_below, enter

PROGRAM = program("spmdrl.envs.worker")
_CLOSE_LIMIT_S = 1.0  # for all that is open at the end; the rank does not wait much longer
_MAX_REASON_CHARACTERS = 500
_MAX_TRACEBACK_CHARACTERS = 20_000

# Where the calls of the user's code come from; what is above it in a traceback says nothing to the user.
_OWN_CODE = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (spmdrl, asyncio, concurrent.futures))

T = TypeVar("T")


def main() -> None:
    """Serve requests until the socket closes."""
    rank = connect()
    job = pickle.loads(receive(rank.makefile("rb")))  # it may read ahead, but nothing is sent before it is answered
    try:
        isolation = enter(job.sandbox, rank.fileno()) if job.sandbox else continue_below(rank.fileno())
    except ValueError as error:
        rank.sendall(line({"problem": str(error)}))
        return
    asyncio.run(_serve(job, rank, isolation))


async def _serve(job: EnvJob, rank: socket.socket, isolation: Isolation) -> None:
    served = _OpenEnvironments(job, isolation)
    try:
        await served.load()
    except BaseException as error:
        is_sentence = isinstance(error, ValueError)
        rank.sendall(line({"problem": str(error) if is_sentence else f"{_reason(error)}\n{_traceback(error)}"}))
        os._exit(1)  # threads of the user's may be alive
    if job.sandbox:
        os.chdir(job.sandbox.folder)  # after loading: a class's file is relative to the rank's directory
    rank.sendall(line({"unprotected": isolation.missing, "tools": served.tools, "gives_rewards": served.gives_rewards}))
    reader, served.writer = await asyncio.open_connection(sock=rank)
    try:
        while True:
            (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
            served.take(pickle.loads(await reader.readexactly(size)))
    except (asyncio.IncompleteReadError, ConnectionError):  # the rank says no more
        with contextlib.suppress(BaseException):  # whatever the user's code raises: it is the end
            await asyncio.wait_for(served.close(), _CLOSE_LIMIT_S)
        os._exit(0)


class _OpenEnvironments:
    """The environments of this process."""

    writer: asyncio.StreamWriter

    def __init__(self, job: EnvJob, isolation: Isolation) -> None:
        self._job, self._isolation = job, isolation
        self._open: dict[int, Environment] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself does not keep them
        self._was_full = False  # no process or thread could be started: see `_clear`

    async def load(self) -> None:
        """Load the source of environments. Raises ValueError with a sentence, or whatever the user's code raises."""
        job = self._job
        asyncio.get_running_loop().set_default_executor(_Threads(job.max_threads, self._report_waiting))
        with needs_package(job.kind):  # tools need pydantic, which other environments start without
            module = importlib.import_module(f"spmdrl.envs.{'tools' if job.kind in ('tools', 'trl') else 'sources'}")
        loaded = getattr(module, f"load_{job.kind}")(**job.settings)
        self._maker: Maker = await loaded if inspect.isawaitable(loaded) else loaded
        self.tools, self.gives_rewards = self._maker.tools, self._maker.gives_rewards

    def take(self, request: EnvRequest | int) -> None:
        """Start what is asked; the answer is sent when it is there."""
        if isinstance(request, int):
            self.writer.write(line({"number": PING}))
            return
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Close all environments, and what they share."""
        await asyncio.gather(*(environment.close() for environment in self._open.values()), return_exceptions=True)
        await self._maker.close()

    async def _answer(self, request: EnvRequest) -> None:
        _NUMBER.set(request.number)
        try:
            answer = await self._outcome(request)
        except BaseException as error:  # whatever an environment raises, even SystemExit, fails only its episode
            self._was_full |= _is_about_room(error)
            answer = {"failure": _reason(error), "traceback": _traceback(error)}
        self.writer.write(line({"number": request.number, **answer}))

    async def _outcome(self, request: EnvRequest) -> dict[str, Any]:
        if isinstance(request, Close):
            await self._close(request.environment)
            return {}
        observation: Observation
        if isinstance(request, Reset):
            environment = self._open[request.environment] = self._maker.make()
            observation = await environment.reset(request.start)
        else:
            observation = await self._open[request.environment].step(request.action)
        return {"observation": to_json(observation, self._job.max_characters)}

    async def _close(self, number: int) -> None:
        environment = self._open.pop(number, None)
        try:
            if environment is not None:
                await environment.close()
        finally:
            if not self._open:
                self._clear()

    def _clear(self) -> None:
        """End what episodes have left; where that cannot be, this process ends, and the rank starts another one."""
        if self._was_full:  # perhaps by children of this process, which `clear` leaves alone
            os._exit(1)
        try:
            clear(self._isolation)
        except OSError:
            os._exit(1)

    def _report_waiting(self, number: int, waits: bool) -> None:
        self.writer.write(line({"number": number, "waits": waits}))


_NO_REQUEST = -1
_NUMBER = contextvars.ContextVar("the request that code runs for", default=_NO_REQUEST)


class _Threads(ThreadPoolExecutor):
    """Threads for code that is not async. The rank learns which request waits for one, and stops its clock."""

    def __init__(self, max_threads: int, report: Callable[[int, bool], None]) -> None:
        super().__init__(max_threads, thread_name_prefix="environment")
        self._loop = asyncio.get_running_loop()
        self._num_free, self._report = max_threads, report  # changed in the loop's thread only

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        number = _NUMBER.get()
        waits = self._num_free <= 0 and number != _NO_REQUEST
        self._num_free -= 1
        if waits:
            self._report(number, True)

        def run() -> T:
            if waits:
                self._loop.call_soon_threadsafe(self._report, number, False)
            try:
                return fn(*args, **kwargs)
            except StopIteration as error:  # a future cannot hold it: who waits would wait for ever
                raise RuntimeError("StopIteration") from error
            finally:
                self._loop.call_soon_threadsafe(self._release)

        return super().submit(run)

    def _release(self) -> None:
        self._num_free += 1


def _is_about_room(error: BaseException) -> bool:
    """True for what Python raises where a process or a thread would be one too many."""
    return isinstance(error, BlockingIOError) or (isinstance(error, RuntimeError) and "new thread" in str(error))


def _reason(error: BaseException) -> str:
    first = of_error(error).splitlines()[0]
    return first[:_MAX_REASON_CHARACTERS].encode(errors="replace").decode()


def _traceback(error: BaseException | None) -> str:
    """Return an error's traceback from the user's code on; empty if that is not in it."""
    at = None if error is None else error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith(_OWN_CODE):
        at = at.tb_next
    if error is None:
        return ""
    if at is None:
        return _traceback(error.__cause__)
    text = "".join(traceback.format_exception(type(error), error, at))
    return text[-_MAX_TRACEBACK_CHARACTERS:].encode(errors="replace").decode()
