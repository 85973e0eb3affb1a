"""A run's folder has one owner; a dead one is recognized, and one on another host by the time of its file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from spmdrl.faults import lock
from spmdrl.faults.lock import FolderInUse, owned

RENEW_S = 0.05


def test_a_second_owner_is_told_of_the_first_and_changes_nothing(tmp_path: Path) -> None:
    with owned(tmp_path):
        before = (tmp_path / "lock").read_text()
        sentence = rf"{tmp_path} is in use by process {os.getpid()} on {os.uname().nodename}, since 20"
        with pytest.raises(FolderInUse, match=sentence), owned(tmp_path):
            pass
        assert (tmp_path / "lock").read_text() == before
    with owned(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = "import os, signal, sys; from pathlib import Path; from spmdrl.faults.lock import owned\n"
    program += "with owned(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == -9
    assert json.loads((tmp_path / "lock").read_text())["host"] == os.uname().nodename
    with owned(tmp_path, renew_s=60.0):  # without waiting: this host knows that it is gone
        pass


@pytest.mark.parametrize("is_alive", [True, False])
def test_an_owner_on_another_host_is_alive_while_it_renews(tmp_path: Path, is_alive: bool) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "2026-01-02 03:04:05"}))
    over = threading.Event()
    with path.open("a") as file:
        renewal = threading.Thread(target=lock._renew, args=(file, over, RENEW_S))
        if is_alive:
            renewal.start()
        try:
            if is_alive:
                with (
                    pytest.raises(FolderInUse, match="by process 7 on elsewhere, since 2026"),
                    owned(tmp_path, renew_s=1),
                ):
                    pass
                assert "elsewhere" in path.read_text()
            else:
                with owned(tmp_path, renew_s=RENEW_S):
                    assert json.loads(path.read_text())["pid"] == os.getpid()
        finally:
            over.set()
            if is_alive:
                renewal.join()


def test_without_locks_a_process_of_this_host_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with owned(tmp_path), pytest.raises(FolderInUse, match=f"process {os.getpid()} on"), owned(tmp_path):
        pass
    with owned(tmp_path):
        pass
