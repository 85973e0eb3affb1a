"""The thread of each rank that looks after it: says where it is, hears signals, and ends what is stuck.

What goes wrong in the loop becomes one cause for all ranks (`verdict.py`), and what only follows from it is written to
the rank's log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import any_rank, gather_objects
from spmdrl.dist.session import World, shared_store
from spmdrl.faults.cause import OomKills, chain, hints_of, is_secondary
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import (
    RankStatus,
    describe_hang,
    furthest_behind,
    has_ended,
    own_host,
    process_state,
    read_posts,
    silent,
    stuck,
)
from spmdrl.faults.stacks import (
    BEGIN,
    DONE,
    DUMP_SIGNAL,
    END,
    STACKS_TO,
    ask_descendants,
    ask_for_stacks,
    grouped,
    main_stack,
    size_of,
    text_after,
)
from spmdrl.faults.verdict import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_LOST_RANK,
    SUPERVISED,
    ErrorReport,
    Kind,
    Requeue,
    claim,
    complete,
    read_error,
    write_requeue,
)
from spmdrl.types import TrainingDiverged, UserError

TICK_S = 1.0  # how often a watch looks around
BEAT_S = 5.0  # how often it says that it lives, where nothing changes; shared storage has to bear it from all ranks
BEATS_MISSED = 3  # without one, a rank does not answer
ANSWER_S = 10.0  # for all ranks to write their stacks
CAUSE_WAIT_S = 2.0  # for the rank that knows the cause, by one that only lost its connection
LEAVE_S = 8.0  # for a rank to end by itself, when the job ends
ERROR_WAIT_S = 60.0  # the same, since a rank has failed: a collective of NCCL does not notice

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


GivenT = TypeVar("GivenT")
ResultT = TypeVar("ResultT")


class JobFailed(Exception):
    """A failure that has been reported; `words` are left to print for this rank, if any, and `exit_code` to return."""

    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.words, self.exit_code = words, exit_code


def failure_in(error: BaseException) -> JobFailed | None:
    """The failure that was reported before an error of the clearing up after it, or `error` itself."""
    return next((one for one in chain(error) if isinstance(one, JobFailed)), None)


@dataclass(frozen=True, slots=True)
class StopRequest:
    """That the run stop, saved."""

    reason: str
    again: bool = True  # whether it may be started again at once


class Stop:
    """Whether this rank wants the run to stop; ranks agree on it by `Watch.agree_to_stop`."""

    def __init__(self, before: datetime | None = None) -> None:
        """`before`: steps that would not end before it are not begun, and one that has not ended then is given up;
        without a time zone it is local time."""
        self._before = before
        self._asked: StopRequest | None = None
        self._last_end: float | None = None
        self._longest_step_s = 0.0

    def ask(self, wish: StopRequest) -> None:
        """Somebody wants the run to stop; the first reason is the one that is told."""
        self._asked = self._asked or wish

    def end_step(self, now: float) -> None:
        """A step has ended, or the first one begins, at unix time `now`."""
        if self._last_end is not None:
            self._longest_step_s = max(self._longest_step_s, now - self._last_end)
        self._last_end = now

    def wish(self, now: float) -> StopRequest | None:
        """What there is at unix time `now`: as asked, or by the clock."""
        if self._asked is not None or self._before is None or now < self._before.timestamp():
            return self._asked
        return StopRequest(f"run.stop_before = {self._before.isoformat(timespec='minutes')}", again=False)

    def wish_before_step(self, now: float) -> StopRequest | None:
        """The same between two steps: by the clock also when a step like the longest would be late."""
        return self.wish(now + self._longest_step_s)


class Watch:
    """One rank's. Use it by `watch_over`."""

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
        """`launch` is the same on all ranks and in no other launch; `timeout_s` 0: nothing is taken to be stuck."""
        self._files, self._timeout_s = files, timeout_s
        self._tick_s = min(TICK_S, timeout_s / 10 or TICK_S)
        self._beat_s = min(BEAT_S, timeout_s / 10 or BEAT_S)
        self._check_s = max(self._tick_s, timeout_s / 20, num_ranks / 10)  # all of them may look at all posts
        self._stop, self._agreed = Stop(stop_before), StopRequest("")
        self._beat = 0  # the thread's, as the post is the main thread's: neither waits for the other
        self._post = RankStatus(
            launch=launch,
            rank=rank,
            num_ranks=num_ranks,
            host=own_host(),
            pid=os.getpid(),
            step=0,
            phase="start",
            phases_entered=0,
            moved_at=time.time(),
        )
        self._oom_kills = OomKills.now()
        self._leave: tuple[float, int] | None = None  # when to end this process whatever it does, and with which code
        self._fails = False  # the main thread is on its way out with an error
        self._closing = threading.Event()
        files.log_of(rank).parent.mkdir(parents=True, exist_ok=True)
        files.posts.mkdir(parents=True, exist_ok=True)
        self._log = files.log_of(rank).open("a", encoding="utf-8", buffering=1)
        self._signals, self._wakeup = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    # What the loop tells.

    def enter(self, phase: str) -> None:
        """This rank begins a phase."""
        post = self._post
        entered = post.phases_entered + 1
        self._post = dataclasses.replace(post, phase=phase, phases_entered=entered, moved_at=time.time())
        self._wake_thread()

    def moved(self) -> None:
        """This rank has got on inside its phase."""
        self._post = dataclasses.replace(self._post, moved_at=time.time())

    def following(self, act: Callable[[GivenT], ResultT]) -> Callable[[GivenT], ResultT]:
        """The same function; whenever it is called, this rank has got on inside its phase."""

        def followed(given: GivenT) -> ResultT:
            self.moved()
            return act(given)

        return followed

    def begin_step(self, step: int) -> None:
        """This rank begins a step."""
        self._post = dataclasses.replace(self._post, step=step, moved_at=time.time())
        self.note(f"step {step}")

    def note(self, text: str) -> None:
        """Write to the rank's log."""
        with contextlib.suppress(OSError):  # a full disk has more important victims
            self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def note_all(self, lines: Iterable[str], *, show: Callable[[str], None]) -> None:
        """Write lines to the rank's log, each with what explains it, and show them to the user."""
        for line in map(self.explained, lines):
            self.note(line)
            show(line)

    def explained(self, text: str) -> str:
        """A sentence, and what the kernel has done for want of memory where it tells of a process that was killed."""
        hints = OomKills.now().since(self._oom_kills) if "SIGKILL" in text else []
        return "; ".join([text, *hints])

    def ask_to_stop(self, wish: StopRequest | None) -> None:
        """What another rank was asked, if anything."""
        if wish is not None:
            self._stop.ask(wish)

    def wish_to_stop(self) -> StopRequest | None:
        """What this rank was asked, if anything."""
        return self._stop.wish(time.time())

    def agree_to_stop(self, mesh: DeviceMesh) -> bool:
        """Whether to stop now, at an edge between two phases, the same on every rank of the mesh; all of them must
        ask. As long as nobody was told, it takes one all-reduce of one number on the host."""
        return self._agree(mesh, self.wish_to_stop())

    def agree_to_stop_before_step(self, mesh: DeviceMesh) -> bool:
        """The same between two steps, where there may be no time for another one."""
        now = time.time()
        self._stop.end_step(now)
        return self._agree(mesh, self._stop.wish_before_step(now))

    def _agree(self, mesh: DeviceMesh, mine: StopRequest | None) -> bool:
        if not any_rank(mesh, mine is not None):
            return False
        wishes = [wish for wish in gather_objects(mesh, mine) if wish is not None]
        # Somebody's wish comes before the clock's, after which a setting has to change.
        self._agreed = next((wish for wish in wishes if wish.again), wishes[0])
        return True

    def leave_requeue(self, *, step: int, num_steps: int) -> str:
        """After `agree_to_stop`, and once `step` is saved: say that the run is to be started again. A later step that
        has begun is given up. One rank calls this; returns what the user should read."""
        requeue = Requeue(
            launch=self._post.launch,
            step=step,
            num_steps=num_steps,
            given_up=self._post.step > step,
            reason=self._agreed.reason,
            again=self._agreed.again,
        )
        write_requeue(self._files, requeue)
        return requeue.text()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """What goes wrong in this block is reported before anything is closed, and comes out as `JobFailed`."""
        try:
            yield
        except Exception as error:
            raise (failure_in(error) or self._failed(error)) from error

    # The thread.

    def start(self) -> None:
        """Begin to watch. Only the main thread may do it: it gets the signals."""
        self.note(f"rank {self._post.rank} of {self._post.num_ranks} on {self._post.host}, pid {self._post.pid}")
        # The wake-up descriptor is written to in the signal's own handler, also while the main thread is in a library.
        self._signals.settimeout(self._tick_s)
        self._wakeup.setblocking(False)
        # That is for the thread; a handler of Python's only has to be there, but hears SIGUSR1 a moment sooner.
        handlers = {signal.SIGTERM: lambda *_: None, signal.SIGUSR1: lambda *_: self._stop.ask(StopRequest("SIGUSR1"))}
        self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._faults_before = faulthandler.is_enabled()
        faulthandler.enable(self._log)
        faulthandler.register(DUMP_SIGNAL, self._log, chain=False)
        os.environ[STACKS_TO] = str(self._files.log_of(self._post.rank).absolute())
        self._show()
        self._thread.start()

    def close(self) -> None:
        """Stop watching: this rank has left the loop, in one way or another."""
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
        self._post = dataclasses.replace(self._post, ended=True)
        self._show()
        for end in (self._signals, self._wakeup, self._log):
            end.close()

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # it is awake: there is more to read than fits
            self._wakeup.send(b"\0")

    def _show(self) -> None:
        with contextlib.suppress(OSError):
            dataclasses.replace(self._post, beat=self._beat).write(self._files)

    def _run(self) -> None:
        shown, beat_at, check_at, error_at = self._post, 0.0, 0.0, 0.0
        while not self._closing.is_set():
            for number in self._heard():
                self._on_signal(number)
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + self._beat_s
                self._beat += 1
                self._show()
                self._look_at_files()
                error_at = error_at or (now if self._other_failed() else 0.0)
            if self._post is not shown:
                shown = self._post
                self._show()
            if self._timeout_s and now >= check_at and time.time() - self._post.moved_at > self._timeout_s:
                check_at = now + self._check_s
                self._look_for_hang()
            if error_at and now - error_at > ERROR_WAIT_S:
                self._leave_within(LEAVE_S, EXIT_LOST_RANK, "another rank has failed")
                error_at = 0.0
            if self._leave is not None and now > self._leave[0] and not self._fails:
                self.note(f"ended with exit code {self._leave[1]}")
                os._exit(self._leave[1])

    def _heard(self) -> bytes:
        """The signals since the last call, after a tick at most."""
        try:
            return self._signals.recv(4096)
        except TimeoutError:
            return b""

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            self._leave_within(LEAVE_S, EXIT_INTERRUPTED, "interrupted")
        elif number in STOP_SIGNALS:
            name = signal.Signals(number).name
            if number == signal.SIGTERM and self._job_ends():
                # torchrun ends the other ranks like this when one has failed.
                self._leave_within(LEAVE_S, EXIT_LOST_RANK, "SIGTERM, and another rank has ended")
            else:
                self.note(f"{name}: asked to stop")
                self._stop.ask(StopRequest(name))

    def _leave_within(self, seconds: float, code: int, why: str) -> None:
        """End this process then, if it has not ended by itself: its main thread may wait for ranks that are gone."""
        if self._leave is None:
            self.note(why)
            self._leave = (time.monotonic() + seconds, code)

    def _job_ends(self) -> bool:
        return self._other_failed() or any(has_ended(post, self._post.host) for post in self._others())

    def _others(self) -> list[RankStatus]:
        posts = read_posts(self._files, launch=self._post.launch)
        return [post for post in posts if post.rank != self._post.rank]

    def _other_failed(self) -> bool:
        report = read_error(self._files, launch=self._post.launch)
        return report is not None and report.kind != "hang"

    def _look_at_files(self) -> None:
        if self._files.stop.exists():
            try:
                reason = self._files.stop.read_text(encoding="utf-8").strip()
            except OSError:
                reason = ""
            self._stop.ask(StopRequest(reason or str(self._files.stop)))
        report = read_error(self._files, launch=self._post.launch)
        if report is not None and report.kind == "hang":
            self._end_in_hang()

    # A hang.

    def _look_for_hang(self) -> None:
        """Claim it, gather the stacks of all ranks, and end."""
        before = read_posts(self._files, launch=self._post.launch)
        if not stuck(before, now=time.time(), timeout_s=self._timeout_s):
            return
        self._beat_for(BEATS_MISSED * self._beat_s)
        posts = read_posts(self._files, launch=self._post.launch)
        if not stuck(posts, now=time.time(), timeout_s=self._timeout_s):
            return
        unheard = [post for post in silent(before, posts) if post.rank != self._post.rank]
        sizes = {post.rank: size_of(self._files.log_of(post.rank)) for post in posts}
        message = describe_hang(posts, {post.rank for post in unheard}, timeout_s=self._timeout_s)
        culprit = next(iter(unheard or furthest_behind(posts)), self._post)
        report = dataclasses.replace(self._report("hang", message), **_who(culprit), complete=False)
        if claim(self._files, report) == "late":
            self._end_in_hang()
        self._dump()
        for post in unheard:
            self._wake(post)
        stacks = {rank: main_stack(text) for rank, text in self._answers(sizes).items()}
        logs = self._files.log_of(0).parent
        text = f"{grouped(stacks)}\nall threads, and the processes of engines: {logs}/rank-*.log"
        hints = ["set watchdog.timeout_s higher if a phase may take so long"] if not unheard else []
        report = dataclasses.replace(report, stacks=text, hints=hints, complete=True)
        complete(self._files, report)
        if SUPERVISED not in os.environ:
            print(report.text(), file=sys.stderr, flush=True)
        for post in unheard:
            if post.host == self._post.host and process_state(post.pid) is not None:
                with contextlib.suppress(OSError):
                    os.kill(post.pid, signal.SIGKILL)
        os._exit(EXIT_HANG)

    def _answers(self, sizes: Mapping[int, int]) -> dict[int, str]:
        """What ranks have written since their logs had these sizes; waits until all are done, or long enough."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            texts = {rank: text_after(self._files.log_of(rank), size) for rank, size in sizes.items()}
            if all(DONE in text for text in texts.values()) or time.monotonic() > deadline:
                return texts
            self._beat_for(self._tick_s)

    def _end_in_hang(self) -> None:
        """Another rank has claimed it: give it the stacks, and end once it has them."""
        self._dump()
        for post in self._others():
            if post.host == self._post.host and process_state(post.pid) == "T":
                self._wake(post)
        deadline = time.monotonic() + 2 * ANSWER_S
        while time.monotonic() < deadline:
            report = read_error(self._files, launch=self._post.launch)
            if report is not None and report.complete:
                break
            time.sleep(self._tick_s)
        os._exit(EXIT_HANG)

    def _beat_for(self, seconds: float) -> None:
        """Wait, and go on to show that this rank lives."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._beat += 1
            self._show()
            time.sleep(min(self._beat_s, max(0.0, deadline - time.monotonic())))

    def _wake(self, post: RankStatus) -> None:
        """Have a rank of this host that does not answer say where it is; one that was stopped goes on to do so."""
        if post.host == self._post.host and ask_for_stacks(post.pid):
            with contextlib.suppress(OSError):
                os.kill(post.pid, signal.SIGCONT)

    def _dump(self) -> None:
        """Write the stacks of this rank and of its engine to its log, and torch's record of collectives beside it."""
        with contextlib.suppress(OSError):
            self._log.write(f"{BEGIN} rank {self._post.rank} in {self._post.place}\n")
            faulthandler.dump_traceback(self._log)
            self._log.write(f"{END}\n")
            ask_descendants(self._post.pid)
            if record := flight_record():
                self._files.flight_record_of(self._post.rank).write_text(record, encoding="utf-8")
            self._log.write(f"{DONE}\n")

    # A failure.

    def _failed(self, error: Exception) -> JobFailed:
        """Report what ended the loop on this rank; returns what the rank has to raise instead."""
        self._fails = True
        details = "".join(traceback.format_exception(error))
        if is_secondary(error):
            self.note(f"a secondary error, of another rank's end:\n{details}")
            return self._lost(error, details)
        kind = _kind_of(error)
        message = str(error) if kind != "error" else traceback.format_exception_only(error)[-1].strip()
        hints = hints_of(error, self._oom_kills)
        report = self._report(kind, message, traceback=details if kind == "error" else "", hints=hints)
        return self._claimed(report, details)

    def _lost(self, error: Exception, details: str) -> JobFailed:
        """Another rank is gone. If it does not say why, this one says what can be seen."""
        before = self._others()
        deadline = time.monotonic() + CAUSE_WAIT_S
        while time.monotonic() < deadline and not self._other_failed():
            time.sleep(0.1)
        if self._other_failed():
            return JobFailed("", EXIT_LOST_RANK)
        dead = [post for post in before if has_ended(post, self._post.host)]
        if not dead:  # it may be on another host, where only its beats would tell
            time.sleep(max(0.0, BEATS_MISSED * self._beat_s - CAUSE_WAIT_S))
            dead = [post for post in silent(before, self._others()) if post.host != self._post.host]
        hints = OomKills.now().since(self._oom_kills)
        if not dead:
            message = traceback.format_exception_only(error)[-1].strip()
            return self._claimed(self._report("error", message, traceback=details, hints=hints), details)
        sentences = [f"{post.name} has ended without a word in {post.place}" for post in dead]
        report = dataclasses.replace(
            self._report("lost", "; ".join(sentences) + ": it was killed, or ended in native code", hints=hints),
            **_who(dead[0]),
            log_lines=self._files.last_lines(dead[0].rank),
        )
        return self._claimed(report, details)

    def _claimed(self, report: ErrorReport, details: str) -> JobFailed:
        """Whoever is first speaks, or leaves that to the program that started the ranks; the others write it down."""
        won = claim(self._files, report)
        if won == "late":
            self.note(f"another rank has failed before this one did:\n{details}")
            return JobFailed("", report.exit_code)
        speaks = won == "unwritten" or SUPERVISED not in os.environ
        return JobFailed(report.text() if speaks else "", report.exit_code)

    def _report(self, kind: Kind, message: str, *, traceback: str = "", hints: Sequence[str] = ()) -> ErrorReport:
        return ErrorReport(
            launch=self._post.launch,
            kind=kind,
            num_ranks=self._post.num_ranks,
            message=message,
            traceback=traceback,
            hints=list(hints),
            log_lines=self._files.last_lines(self._post.rank),
            **_who(self._post),
        )


def _kind_of(error: Exception) -> Kind:
    if isinstance(error, UserError):
        return "user"
    return "diverged" if isinstance(error, TrainingDiverged) else "error"


def _who(post: RankStatus) -> dict[str, Any]:
    """Whose failure it is, for a report."""
    return {"rank": post.rank, "host": post.host, "pid": post.pid, "step": post.step, "phase": post.phase}


def flight_record() -> str:
    """Torch's record of the last collectives as JSON; "" where it keeps none."""
    dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    try:
        return "" if dump is None else dump().decode()
    except RuntimeError:
        return ""


@contextmanager
def watch_over(
    files: FaultFiles, world: World, *, timeout_s: float, stop_before: datetime | None = None
) -> Iterator[Watch]:
    """Watch this rank while it is in the loop. Every rank enters this, inside the session.

    Whatever ends the loop early comes out as `JobFailed`, reported.
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
            files.stop.unlink(missing_ok=True)  # it came too late to be heard, and is not meant for the next launch
    finally:
        watch.close()
