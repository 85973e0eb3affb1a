"""Two launches of one command, and a launcher that is killed: the run's folder has one owner, and nothing stays."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spmdrl.faults.lock import owned
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.small_run import write_config

LIMIT_S = 120.0


def wait_for(condition: object, what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, what
        time.sleep(0.1)


def test_the_second_launch_is_refused_and_a_killed_launcher_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model", hidden_size=32, num_layers=1)
    config = write_config(tmp_path, run={"num_steps": 100000, "dir": str(tmp_path)}, checkpoint={"every": 1})
    command = [sys.executable, "-m", "spmdrl.tools.local", "spmdrl.train", str(config)]
    folder, metrics = tmp_path / "run", tmp_path / "run/metrics.jsonl"
    with open(tmp_path / "first.txt", "w") as output:
        first = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        wait_for(lambda: metrics.exists() and metrics.stat().st_size, "the first launch does not train")
        for again in (command, [sys.executable, "-m", "spmdrl.train", str(config)]):  # with and without a launcher
            second = subprocess.run(again, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            assert second.returncode == 2, second.stderr
            assert f"the run folder {folder} is in use by process {first.pid} on " in second.stderr
            assert "Traceback" not in second.stderr
        size = metrics.stat().st_size
        wait_for(lambda: metrics.stat().st_size > size, "the first launch has stopped training")
        started = psutil.Process(first.pid).children(recursive=True)
        assert len(started) >= 3, "an agent and two ranks"
    finally:
        first.kill()
        first.wait()
    gone, alive = psutil.wait_procs(started, timeout=30)
    assert not alive, f"still there, of {len(gone) + len(alive)}: {alive}"
    lines = metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(len(lines))]
    with owned(folder):
        pass
