"""The watch of each rank: a thread that shows where the rank is, receives signals, and ends a rank that is stuck.

The loop tells it each phase and asks it whether to stop. Requests to stop are in `watch.py`, the rank's status
and log in `rank_status.py`, failures and hangs in `failure.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import any_rank, gather_objects
from spmdrl.dist.session import World, shared_store
from spmdrl.faults.failure import DUMP_SIGNAL, STACKS_TO, OomKills, Watchdog, failure_in, report_failure
from spmdrl.faults.files import FaultFiles, open_ordinary
from spmdrl.faults.rank_status import BEAT_S, Heartbeat
from spmdrl.faults.text import one_line
from spmdrl.faults.verdict import EXIT_INTERRUPTED, EXIT_LOST_RANK, Requeue, write_requeue

# Requests to stop the run: from a signal, from the file `stop`, from another rank, or because of `run.stop_before`.


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A request to save and stop the run."""

    reason: str
    again: bool = True  # False where a restart at once would stop at once


class StopRequests:
    """The stop requests that this rank knows of; ranks agree on one in `Watch.agree_to_stop`."""

    def __init__(self, before: datetime | None = None) -> None:
        """`before` is `run.stop_before`: no step begins that is expected to end later, and one that is running then
        stops. Without a time zone it is local time."""
        self._before = before
        self._received: StopRequest | None = None
        self._last_end: float | None = None
        self._longest_step_s = 0.0

    def add(self, request: StopRequest) -> None:
        """Keep a request. The user is shown the reason of the first one."""
        self._received = self._received or request

    def end_step(self, now: float) -> None:
        """Measure the step that ends at unix time `now`; the first call starts the clock."""
        if self._last_end is not None:
            self._longest_step_s = max(self._longest_step_s, now - self._last_end)
        self._last_end = now

    def current(self, now: float) -> StopRequest | None:
        """Return the request received so far, or one for `run.stop_before` if that time has come at unix time `now`."""
        if self._received is not None or self._before is None or now < self._before.timestamp():
            return self._received
        return StopRequest(f"run.stop_before = {self._before.isoformat(timespec='minutes')}", again=False)

    def before_step(self, now: float) -> StopRequest | None:
        """Like `current`, between two steps: also stops if another step as long as the longest would end too late."""
        return self.current(now + self._longest_step_s)


TICK_S = 1.0  # between two polls of signals and files
LEAVE_S = 8.0  # for a rank to end by itself when the job ends
ERROR_WAIT_S = 60.0  # the same after another rank has failed, which an NCCL collective does not notice

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


GivenT = TypeVar("GivenT")
ResultT = TypeVar("ResultT")


class Watch:
    """The watch of one rank. Use it through `watch_over`."""

    def __init__(
        self,
        files: FaultFiles,
        *,
        launch: str,
        rank: int,
        num_ranks: int,
        timeout_s: float = 0.0,
        stop_before: datetime | None = None,
    ) -> None:
        """`launch` is the same on all ranks and differs between launches; with `timeout_s` 0 there is no watchdog."""
        self._tick_s = min(TICK_S, timeout_s / 10 or TICK_S)
        beat_s = min(BEAT_S, timeout_s / 10 or BEAT_S)
        self._heartbeat = Heartbeat(files, launch=launch, rank=rank, num_ranks=num_ranks, beat_s=beat_s)
        self._watchdog = Watchdog(self._heartbeat, timeout_s=timeout_s, tick_s=self._tick_s)
        self._stop_requests, self._agreed = StopRequests(stop_before), StopRequest("")
        self._oom_kills = OomKills.now()
        self._leave: tuple[float, int] | None = None  # when to end this process, whatever it does, and with which code
        self._failing = False  # the main thread is reporting an error and about to end
        self._closing = threading.Event()
        self._signals, self._wakeup = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # Called by the loop.

    def enter(self, phase: str) -> None:
        """Record that this rank enters a phase."""
        entered = self._heartbeat.status.phases_entered + 1
        self._heartbeat.update(phase=phase, phases_entered=entered, moved_at=time.time())
        self._wake_thread()

    def marking_progress(self, act: Callable[[GivenT], ResultT]) -> Callable[[GivenT], ResultT]:
        """Wrap a function so that each call counts as progress of this rank."""

        def marked(given: GivenT) -> ResultT:
            self._heartbeat.update(moved_at=time.time())
            return act(given)

        return marked

    def begin_step(self, step: int) -> None:
        """Record that this rank begins a step."""
        self._heartbeat.update(step=step, moved_at=time.time())
        self.note(f"step {step}")

    def note(self, text: str) -> None:
        self._heartbeat.note(text)

    def note_all(self, lines: Iterable[str], *, show: Callable[[str], None]) -> None:
        """Write lines to the rank's log, and show them; one about a killed process ends with what the kernel has killed
        for lack of memory."""
        for text in lines:
            hints = OomKills.now().since(self._oom_kills) if "SIGKILL" in text else []
            line = "; ".join([text, *hints])
            self.note(line)
            show(line)

    def request_stop(self, request: StopRequest | None) -> None:
        """Pass on a stop request that another rank received; None does nothing."""
        if request is not None:
            self._stop_requests.add(request)

    def stop_request(self) -> StopRequest | None:
        """Return the stop request that this rank has received, if any."""
        return self._stop_requests.current(time.time())

    def agree_to_stop(self, mesh: DeviceMesh) -> bool:
        """Decide between two phases whether to stop: True on every rank of the mesh if any rank has a stop request.
        Every rank of the mesh must call this; without a request it costs one all-reduce of one number on the host."""
        return self._agree(mesh, self.stop_request())

    def agree_to_stop_before_step(self, mesh: DeviceMesh) -> bool:
        """Like `agree_to_stop`, between two steps: also stops if there may be no time for another step."""
        now = time.time()
        self._stop_requests.end_step(now)
        return self._agree(mesh, self._stop_requests.before_step(now))

    def _agree(self, mesh: DeviceMesh, mine: StopRequest | None) -> bool:
        if not any_rank(mesh, mine is not None):
            return False
        requests = [request for request in gather_objects(mesh, mine) if request is not None]
        # A request that was sent comes before `run.stop_before`, which the user must change before a restart.
        self._agreed = next((request for request in requests if request.again), requests[0])
        return True

    def write_requeue(self, *, step: int, num_steps: int) -> str:
        """Write the file `requeue` after `agree_to_stop`, once `step` is saved; returns the line to show the user.

        A later step that has started is discarded. One rank calls this.
        """
        status = self._heartbeat.status
        requeue = Requeue(
            launch=status.launch,
            step=step,
            num_steps=num_steps,
            given_up=status.step > step,
            reason=self._agreed.reason,
            again=self._agreed.again,
        )
        write_requeue(self._heartbeat.files, requeue)
        return requeue.text()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an exception of this block before anything is closed, and raise `JobFailed` in its place."""
        try:
            yield
        except Exception as error:
            failure = failure_in(error)
            if failure is None:
                self._failing = True
                failure = report_failure(self._heartbeat, error, self._oom_kills)
            raise failure from error

    # The thread.

    def start(self) -> None:
        """Start to watch. Only the main thread may call this: it receives the signals."""
        status = self._heartbeat.status
        self.note(f"rank {status.rank} of {status.num_ranks} on {status.host}, pid {status.pid}")
        # The C handler writes to the wake-up descriptor at once, even while the main thread is inside a library.
        self._signals.settimeout(self._tick_s)
        self._wakeup.setblocking(False)
        # The thread reads the signals from there. A Python handler must exist for that; SIGUSR1's is a little faster.
        handlers = {
            signal.SIGTERM: lambda *_: None,
            signal.SIGUSR1: lambda *_: self._stop_requests.add(StopRequest("SIGUSR1")),
        }
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._faults_before = faulthandler.is_enabled()
        faulthandler.enable(self._heartbeat.log)
        faulthandler.register(DUMP_SIGNAL, self._heartbeat.log, chain=False)
        os.environ[STACKS_TO] = str(self._heartbeat.files.log_of(status.rank).absolute())
        self._heartbeat.write()
        self._thread.start()

    def close(self) -> None:
        """Stop watching: this rank has left the loop, successfully or not."""
        self._closing.set()
        self._wake_thread()
        self._thread.join()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        faulthandler.unregister(DUMP_SIGNAL)
        faulthandler.disable()
        if self._faults_before:
            faulthandler.enable(sys.__stderr__ or sys.stderr)
        os.environ.pop(STACKS_TO, None)
        self._heartbeat.update(ended=True)
        self._heartbeat.write()
        for end in (self._signals, self._wakeup, self._heartbeat.log):
            end.close()

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full, so the thread is awake already
            self._wakeup.send(b"\0")

    def _run(self) -> None:
        heartbeat = self._heartbeat
        written, beat_at, error_at = heartbeat.status, 0.0, 0.0
        while not self._closing.is_set():
            for number in self._receive_signals():
                self._on_signal(number)
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + heartbeat.beat_s
                heartbeat.beat()
                self._read_files()
                error_at = error_at or (now if heartbeat.rank_failed() else 0.0)
            if heartbeat.status is not written:
                written = heartbeat.status
                heartbeat.write()
            self._watchdog.check(now)
            if error_at and now - error_at > ERROR_WAIT_S:
                self._leave_soon(EXIT_LOST_RANK, "another rank has failed")
                error_at = 0.0
            if self._leave is not None and now > self._leave[0] and not self._failing:
                self.note(f"ended with exit code {self._leave[1]}")
                os._exit(self._leave[1])

    def _receive_signals(self) -> bytes:
        """Return the numbers of the signals since the last call; waits for one tick at most."""
        try:
            return self._signals.recv(4096)
        except TimeoutError:
            return b""

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._leave_soon(EXIT_INTERRUPTED, "interrupted")
        elif number in STOP_SIGNALS:
            name = signal.Signals(number).name
            if number == signal.SIGTERM and self._heartbeat.job_is_ending():
                # torchrun ends the other ranks with SIGTERM when one has failed.
                self._leave_soon(EXIT_LOST_RANK, "SIGTERM, and another rank has ended")
            else:
                self.note(f"{name}: stop requested")
                self._stop_requests.add(StopRequest(name))

    def _leave_soon(self, code: int, why: str) -> None:
        """End this process after `LEAVE_S` if it has not ended by itself: it may be waiting for ranks that are gone."""
        if self._leave is None:
            self.note(why)
            self._leave = (time.monotonic() + LEAVE_S, code)

    def _read_files(self) -> None:
        """Look for the file `stop`, and for a hang that another rank has reported."""
        stop = self._heartbeat.files.stop
        if stop.exists():
            try:
                with open_ordinary(stop) as file:
                    reason = one_line(file.read().decode(errors="backslashreplace").strip())
            except OSError:
                reason = ""
            self._stop_requests.add(StopRequest(reason or str(stop)))
        report = self._heartbeat.error()
        if report is not None and report.kind == "hang":
            self._watchdog.join_hang()


@contextmanager
def watch_over(
    files: FaultFiles, world: World, *, timeout_s: float, stop_before: datetime | None = None
) -> Iterator[Watch]:
    """Watch this rank while it is in the loop. Every rank enters this block, inside the session.

    Every exception that ends the block is reported and becomes `JobFailed`.
    """
    store = shared_store()
    if world.is_main:
        files.clear()
        store.set("launch", uuid.uuid4().hex)
    watch = Watch(
        files,
        launch=store.get("launch").decode(),
        rank=world.rank,
        num_ranks=world.num_ranks,
        timeout_s=timeout_s,
        stop_before=stop_before,
    )
    watch.start()
    try:
        with watch.reporting():
            yield watch
        if world.is_main:
            files.stop.unlink(missing_ok=True)  # it came too late for this launch, and must not stop the next one
    finally:
        watch.close()
