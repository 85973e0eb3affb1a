"""A run's folder has one owner; a dead one is recognized, and one on another host by the time of its file."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spmdrl.faults import lock
from spmdrl.faults.lock import FolderInUse, owned, require_unowned

RENEW_S = 0.05


def first_launch(folder: Path) -> Path:
    """The file of a run's first launch."""
    return folder / "launches/1.json"


def test_a_second_owner_learns_of_the_first_and_changes_nothing(tmp_path: Path) -> None:
    with owned(tmp_path):
        before = first_launch(tmp_path).read_text()
        sentence = rf"{tmp_path} is in use by process {os.getpid()} on {os.uname().nodename}, since 20"
        with pytest.raises(FolderInUse, match=sentence), owned(tmp_path):
            pass
        assert first_launch(tmp_path).read_text() == before
        assert list((tmp_path / "launches").iterdir()) == [first_launch(tmp_path)]
    assert json.loads(first_launch(tmp_path).read_text())["ended"]
    with owned(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = "import os, signal, sys; from pathlib import Path; from spmdrl.faults.lock import owned\n"
    program += "with owned(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    assert json.loads(first_launch(tmp_path).read_text())["host"] == os.uname().nodename
    with owned(tmp_path, renew_s=60.0):  # without waiting: this host knows that it is gone
        pass


@pytest.mark.parametrize("is_alive", [True, False])
def test_an_owner_on_another_host_is_alive_while_it_renews(tmp_path: Path, is_alive: bool) -> None:
    path = first_launch(tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "2026-01-02 03:04:05", "ended": ""}))
    over = threading.Event()
    with path.open("a") as file:
        renewal = threading.Thread(target=lock._renew, args=(file, tmp_path / "none", over, RENEW_S))
        if is_alive:
            renewal.start()
        try:
            if is_alive:
                in_use = pytest.raises(FolderInUse, match="by process 7 on elsewhere, since 2026")
                with in_use, owned(tmp_path, renew_s=1):
                    pass
            else:
                with owned(tmp_path, renew_s=RENEW_S):
                    pass
            assert (tmp_path / "launches/2.json").exists() != is_alive
        finally:
            over.set()
            if is_alive:
                renewal.join()


def test_a_launch_can_ask_before_it_owns_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_unowned(tmp_path / ("long" * 100))  # the check says what is wrong with it
    require_unowned(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with owned(tmp_path):
        with pytest.raises(FolderInUse) as asked:
            require_unowned(tmp_path)
        with pytest.raises(FolderInUse) as tried, owned(tmp_path):
            pass
        assert str(asked.value) == str(tried.value) and [*(tmp_path / "launches").iterdir()] == [first_launch(tmp_path)]
    require_unowned(tmp_path)
    fields = json.loads(first_launch(tmp_path).read_text())
    first_launch(tmp_path).write_text(json.dumps(fields | {"host": "elsewhere", "ended": ""}))
    monkeypatch.setattr(lock.time, "sleep", lambda _: pytest.fail("only who owns a folder waits for other hosts"))
    require_unowned(tmp_path)


def test_without_locks_a_process_of_this_host_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with owned(tmp_path), pytest.raises(FolderInUse, match=f"process {os.getpid()} on"), owned(tmp_path):
        pass
    with owned(tmp_path):
        pass


RACE = """
import sys, time
from pathlib import Path
from spmdrl.faults import lock
if sys.argv[2] == "no locks":
    def no_locks(file, operation):
        raise OSError(95, "Operation not supported")
    lock.fcntl.flock = no_locks
print("ready", flush=True)
time.sleep(max(0.0, float(sys.stdin.readline()) - time.time()))
for number in range(20):
    folder = Path(sys.argv[1], str(number))
    try:
        with lock.owned(folder, renew_s=0.5):
            print(number, flush=True)
            sys.stdin.readline()
    except lock.FolderInUse:
        print("in use", flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_of_launches_at_one_moment_one_gets_the_folder(tmp_path: Path, locks: str) -> None:
    def process() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RACE, str(tmp_path), locks]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with contextlib.ExitStack() as exits:
        racing = [exits.enter_context(process()) for _ in range(3)]
        assert [one.stdout.readline() for one in racing if one.stdout] == ["ready\n"] * 3
        moment = f"{time.time() + 0.2}\n"
        for number in range(20):
            for one in racing:
                assert one.stdin is not None
                one.stdin.write(moment if number == 0 else "next\n")
                one.stdin.flush()
            results = sorted(one.stdout.readline() for one in racing if one.stdout)
            assert results == [f"{number}\n", "in use\n", "in use\n"]
        for one in racing:
            assert one.stdin is not None
            one.stdin.close()


def test_an_owner_that_looked_dead_and_was_replaced_ends_at_once(tmp_path: Path) -> None:
    program = "import sys, time; from pathlib import Path; from spmdrl.faults.lock import owned\n"
    program += "with owned(Path(sys.argv[1]), renew_s=0.05): print('owns', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "owns\n"
        (tmp_path / "launches/2.json").touch()  # as a launch on another host does
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == -9
    assert stderr == f"ended at once: {tmp_path}/launches/2.json says that another launch owns the folder now\n"
