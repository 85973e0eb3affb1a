"""One cause for every failure, who holds up whom, and when to stop: the parts that need no other rank."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmdrl.dist.session import World
from spmdrl.faults.failure import (
    JobFailed,
    OomKills,
    grouped,
    hints_of,
    is_secondary,
    listens,
    main_stack,
    ranks_phrase,
)
from spmdrl.faults.files import FaultFiles, read_json, replace_json
from spmdrl.faults.rank_status import (
    RankStatus,
    describe_hang,
    furthest_behind,
    has_ended,
    own_host,
    read_statuses,
    silent,
    stuck,
)
from spmdrl.faults.supervise import conclude
from spmdrl.faults.verdict import (
    EXIT_CODES,
    EXIT_REQUEUE,
    ErrorReport,
    Requeue,
    claim,
    read_error,
    read_requeue,
    write_requeue,
)
from spmdrl.faults.watch import StopRequest, StopRequests, Watch, watch_over
from spmdrl.tools import runs
from spmdrl.types import UserError


@pytest.fixture
def files(tmp_path: Path) -> FaultFiles:
    for folder in ("ranks", "logs"):
        (tmp_path / folder).mkdir()
    return FaultFiles(tmp_path)


def status(rank: int, **changes: Any) -> RankStatus:
    settings = {
        "launch": "one",
        "rank": rank,
        "num_ranks": 3,
        "host": "here",
        "pid": 100 + rank,
        "step": 2,
        "phase": "update",
        "phases_entered": 7,
        "moved_at": 50.0,
    }
    return RankStatus(**(settings | changes))


def error_report(rank: int = 0, **changes: Any) -> ErrorReport:
    settings = {
        "launch": "one",
        "kind": "error",
        "rank": rank,
        "num_ranks": 3,
        "host": "here",
        "pid": 100 + rank,
        "step": 2,
        "phase": "update",
        "message": "ValueError: no",
        "traceback": "Traceback (most recent call last):\nValueError: no\n",
    }
    return ErrorReport(**(settings | changes))


def test_only_one_of_many_is_the_cause(files: FaultFiles) -> None:
    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(lambda rank: claim(files, error_report(rank)), range(8)))
    assert sorted(claims) == ["first"] + ["late"] * 7
    found = read_error(files)
    assert found == error_report(claims.index("first"), time=found.time)
    assert read_error(files, launch="another") is None


def test_a_cause_that_cannot_be_written_is_still_told(tmp_path: Path) -> None:
    assert claim(FaultFiles(tmp_path / "absent"), error_report()) == "unwritten"
    (tmp_path / "error.json").write_text('{"launch": "on')
    assert read_error(FaultFiles(tmp_path)) is None


def test_what_only_follows_from_another_failure_is_no_cause() -> None:
    assert is_secondary(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2"))
    assert is_secondary(dist.DistBackendError("NCCL error: remote process exited or there was a network error"))
    assert not is_secondary(RuntimeError("Connection closed by peer"))  # of a judge's server, say
    assert not is_secondary(RuntimeError("[gloo/transport/tcp] Timed out waiting 1800000ms for recv"))


def test_a_full_disk_is_named_wherever_it_shows() -> None:
    none = OomKills.now()
    full = OSError(errno.ENOSPC, "No space left on device", "/runs/x")
    outer = ValueError("could not save")
    outer.__cause__ = full
    for error in (full, outer):
        assert hints_of(error, none) == ["the disk is full, writing /runs/x: make room and start again"]
    assert hints_of(RuntimeError("rank 3: [Errno 28] No space left on device"), none)[0].startswith("the disk is full")
    assert hints_of(OSError(errno.EFBIG, "File too large"), none)[0].startswith("a file is too large")
    assert hints_of(ValueError("no"), none) == []


def test_memory_is_named_by_what_the_kernel_did() -> None:
    before = OomKills(of_group=1, of_host=5)
    assert OomKills(of_group=1, of_host=5).since(before) == []
    assert "killed a process of this job's memory cgroup" in OomKills(of_group=2, of_host=6).since(before)[0]
    assert "killed 2 processes of this host" in OomKills(of_group=1, of_host=7).since(before)[0]
    assert hints_of(MemoryError(), OomKills.now()) == [
        "host memory is used up: this process could not allocate any more"
    ]


def test_a_run_is_stuck_when_no_rank_makes_progress() -> None:
    statuses = [status(0, moved_at=10.0), status(1, moved_at=20.0), status(2, moved_at=99.0, ended=True)]
    assert stuck(statuses, now=51.0, timeout_s=30.0)
    assert not stuck(statuses, now=49.0, timeout_s=30.0)
    assert not stuck([status(2, ended=True, moved_at=0.0)], now=100.0, timeout_s=30.0)


def test_who_holds_up_the_others_is_named_with_its_phase() -> None:
    before = [status(0, beat=1), status(1, beat=4), status(2, beat=9, ended=True)]
    after = [status(0, beat=2), status(1, beat=4, phase="rollout"), status(2, beat=9, ended=True)]
    assert [one.rank for one in silent(before, after)] == [1]
    assert describe_hang(after, {1}, timeout_s=8.0) == (
        "no rank has made progress for 8 s: rank 1 (here, pid 101) is not responding, in step 2, rollout"
    )
    behind = [status(0, phases_entered=7), status(1, phases_entered=6, phase="reward"), status(2, phases_entered=7)]
    assert furthest_behind(behind) == [behind[1]]
    assert "rank 1 (here, pid 101) is behind the others, in step 2, reward" in describe_hang(behind, (), timeout_s=8.0)
    assert describe_hang([status(0), status(1)], (), timeout_s=8.0).endswith("all of them are in step 2, update")


def test_posts_are_read_as_they_were_written_and_only_those_of_the_launch(files: FaultFiles) -> None:
    for one in (status(10), status(2), status(0, launch="before")):
        one.write(files)
    files.status_of(5).write_text('{"rank": 5')
    assert read_statuses(files, launch="one") == [status(2), status(10)]
    files.clear()
    assert read_statuses(files) == []


def test_a_process_that_is_gone_is_seen_on_its_own_host_only() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert has_ended(status(0, pid=ended.pid), "here")
    assert not has_ended(status(0, pid=ended.pid), "there")
    assert not has_ended(status(0, pid=ended.pid, ended=True), "here")
    assert not has_ended(status(0, pid=os.getpid()), "here")


def test_stopping_waits_for_no_step_that_would_end_too_late() -> None:
    deadline = datetime(2026, 11, 21, 8, 0)
    at = deadline.timestamp()
    late = StopRequest("run.stop_before = 2026-11-21T08:00", again=False)
    stop = StopRequests(before=deadline)
    stop.end_step(at - 100)
    assert stop.before_step(at - 99) is None
    stop.end_step(at - 70)
    assert stop.before_step(at - 31) is None
    assert stop.before_step(at - 30) == late
    # A step that has begun may try, until the moment itself.
    assert stop.current(at - 1) is None
    assert stop.current(at) == late
    stop.add(StopRequest("SIGTERM", again=True))
    stop.add(StopRequest("SIGUSR1", again=True))
    assert stop.current(at) == stop.before_step(at) == stop.current(at - 100) == StopRequest("SIGTERM", again=True)
    assert StopRequests().current(at) is None


def test_stacks_of_ranks_in_the_same_place_are_told_once() -> None:
    text = """\
12:00:00 step 3
--- stacks of rank 0 in step 3, update
Thread 0x00007f01 (most recent call first):
  File "threading.py", line 1 in wait

Thread 0x00007f02 [python] (most recent call first):
  File "collectives.py", line 31 in any_rank
  File "train.py", line 1 in train
--- end of stacks
Current thread 0x00007f03 (most recent call first):
  File "scheduler.py", line 2 in loop
"""
    main = '  File "collectives.py", line 31 in any_rank\n  File "train.py", line 1 in train'
    assert main_stack(text) == main
    assert main_stack("12:00:00 step 3\n") == ""
    told = grouped({0: main, 1: main, 2: "", 3: main})
    assert told.count("any_rank") == 1
    assert "ranks 0-1, 3" in told and "main thread of rank 2 (most recent call first):\n  no response" in told
    assert ranks_phrase([4]) == "rank 4"


def test_ranks_that_could_not_write_why_they_ended_had_no_room(
    files: FaultFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    status(1).write(files)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    words, code, _ = conclude(files, 1)
    assert code == EXIT_CODES["user"]
    assert words == (
        f"the ranks ended, and nothing can be written to {files.path}: No space left on device; make room, and the "
        "same command goes on after step 0"
    )


def test_how_a_run_ended_decides_words_and_exit_code(files: FaultFiles) -> None:
    assert conclude(files, 0) == ("", 0, "")
    assert conclude(files, 1) == ("", 1, "")
    status(1).write(files)
    assert conclude(files, 137) == (
        "the ranks ended without an error message: rank 1 (here, pid 101) was in step 2, update",
        EXIT_CODES["lost"],
        "",
    )
    for again, code in ((True, EXIT_REQUEUE), (False, 0)):
        requeue = Requeue(launch="one", step=3, num_steps=9, given_up=again, reason="SIGTERM", again=again)
        files.stop.touch()
        write_requeue(files, requeue)
        assert read_requeue(files) == requeue and not files.stop.exists()
        words, found, reason = conclude(files, 1)
        later = "again" if again else "again with a later run.stop_before"
        assert words == (
            f"stopped after step 3 of 9 (SIGTERM){', step 4 was discarded' if again else ''}; "
            f"run the same command {later} to continue"
        )
        assert (found, reason) == (code, "SIGTERM")
    claim(files, error_report(1, hints=["the disk is full"]))
    words, found, _ = conclude(files, 1)
    assert found == EXIT_CODES["error"]
    assert words.splitlines() == [
        "rank 1 of 3 (here, pid 101) failed in step 2, update:",
        "Traceback (most recent call last):",
        "ValueError: no",
        "the disk is full",
    ]
    assert error_report(kind="user", message="a\nb").text() == "cannot go on:\n  - a\n  - b"
    assert error_report(kind="user", message="a\n  at b").text() == "cannot go on: a\n  at b"
    assert error_report(kind="user", message="a\n  at b\nc").text() == "cannot go on:\n  - a\n      at b\n  - c"
    assert error_report(kind="user", message="a", step=0).text() == "cannot start: a"


def make_watch(files: FaultFiles, **changes: Any) -> Watch:
    return Watch(files, launch="one", rank=0, num_ranks=1, **changes)


def test_a_watch_shows_where_the_rank_is_and_writes_its_stacks(
    files: FaultFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    watch = make_watch(files)
    watch.start()
    try:
        watch.begin_step(3)
        watch.enter("rollout")
        deadline = time.monotonic() + 5
        while [(one.step, one.phase) for one in read_statuses(files)] != [(3, "rollout")]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert runs.ps([str(files.path)]) == 0
        header, row = capsys.readouterr().out.splitlines()
        assert header.split() == ["rank", "host", "pid", "step", "phase", "for", "state"]
        assert row.split() == ["0", own_host(), str(os.getpid()), "3", "rollout", "0:00", "running"]
        assert listens(os.getpid())
        hostile = "\x1b[2J\x07\u202e\nstep 99"
        replace_json(
            files.status_of(1), {**(read_json(files.status_of(0)) or {}), "rank": 1, "host": hostile, "phase": hostile}
        )
        for arguments in ([], ["dump"]):
            assert runs.ps([str(files.path), *arguments]) == 0
            said = capsys.readouterr().out
            assert said.replace("\n", "").isprintable() and "\\x1b[2J" in said and "\nstep 99" not in said
        replace_json(files.status_of(1), {"rank": 1, "host": hostile, "step": 3})
        files.status_of(2).write_bytes(b"\xff")
        os.mkfifo(files.status_of(3))
        for arguments in ([], ["dump"]):
            assert runs.ps([str(files.path), *arguments]) == 0
            said = capsys.readouterr().out
            assert "ranks/rank-1.json is damaged, so nobody knows where its rank is; it says: host \\x1b[2J" in said
            for rank in (2, 3):
                assert f"ranks/rank-{rank}.json is damaged, so nobody knows where its rank is\n" in said
        for rank in (1, 2, 3):
            files.status_of(rank).unlink()
        assert runs.ps([str(files.path), "dump"]) == 0
        assert "in test_a_watch_shows_where_the_rank_is_and_writes_its_stacks" in capsys.readouterr().out
        os.kill(os.getpid(), signal.SIGUSR1)
        while watch.stop_request() is None:
            assert time.monotonic() < deadline + 5
            time.sleep(0.01)
        assert watch.stop_request() == StopRequest("SIGUSR1", again=True)
    finally:
        watch.close()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    assert not listens(os.getpid())
    assert [one.ended for one in read_statuses(files)] == [True]


def test_sigterm_is_no_stop_request_when_another_rank_is_gone(files: FaultFiles) -> None:
    """torchrun ends the ranks that are left with it."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    status(1, pid=gone.pid, host=own_host()).write(files)
    watch = make_watch(files)
    watch.start()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while "SIGTERM, and another rank has ended" not in files.log_of(0).read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert watch.stop_request() is None
    finally:
        watch.close()


def test_the_file_stop_asks_the_run_to_stop(files: FaultFiles) -> None:
    files.stop.write_text("maintenance\n")
    watch = make_watch(files)
    watch.start()
    try:
        deadline = time.monotonic() + 5
        while watch.stop_request() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert watch.stop_request() == StopRequest("maintenance", again=True)
    finally:
        watch.close()


def test_a_stop_request_that_came_too_late_is_not_meant_for_the_next_launch(
    files: FaultFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmdrl.faults.watch.shared_store", dist.HashStore)
    alone = World(
        rank=0, num_ranks=1, local_rank=0, num_local_ranks=1, patience=timedelta(1), device=torch.device("cpu")
    )
    with watch_over(files, alone, timeout_s=0.0):
        files.stop.write_text("late")
    assert not files.stop.exists()
    with pytest.raises(JobFailed), watch_over(files, alone, timeout_s=0.0):
        files.stop.write_text("and then it failed")
        raise ValueError
    assert files.stop.exists()


def test_a_failure_is_reported_where_it_happens(files: FaultFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = make_watch(files)
    watch.begin_step(4)
    watch.enter("update")
    with (
        pytest.raises(Exception, match=r"rank 0 of 1 .* failed in step 4, update:\n(?s:.*)in_here") as raised,
        watch.reporting(),
    ):
        raise KeyError("in_here")
    found = json.loads(files.error.read_text())
    assert (found["kind"], found["step"], found["phase"], found["message"]) == (
        "error",
        4,
        "update",
        "KeyError: 'in_here'",
    )
    assert found["log_lines"][-1].endswith("step 4")
    assert raised.value.exit_code == EXIT_CODES["error"]
    # The second one is written down, and says nothing.
    with pytest.raises(Exception, match=r"^$") as raised, watch.reporting():
        raise UserError("also wrong")
    assert raised.value.exit_code == EXIT_CODES["user"]
    assert "also wrong" in files.log_of(0).read_text()
    watch._heartbeat.log.close()
