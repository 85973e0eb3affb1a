"""Two launches of one command, and a launcher that is killed: the run's folder has one owner, and nothing stays."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from spmdrl.checkpoint.manifest import saved_steps
from spmdrl.faults.lock import owned
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    sample_rows,
    steady_rows,
    torchrun_command,
    write_config,
    write_small_run,
)

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
    (tmp_path / "slow.py").write_text("import time\n\n\ndef score(**_):\n    time.sleep(0.05)\n    return 0.5\n")
    config = write_config(
        tmp_path,
        run={"num_steps": 100000, "dir": str(tmp_path)},
        # Slow, so that the launches that are refused have a processor.
        reward={"terms": [{"kind": "function", "function": f"{tmp_path}/slow.py:score"}]},
        checkpoint={"every": 1},
    )
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


NODE = """
import fcntl, os

os_uname = os.uname
os.uname = lambda: os.uname_result(("Linux", os.environ["NODE"], *os_uname()[2:]))


def flock(file, operation):
    number = file if isinstance(file, int) else file.fileno()
    if "/launches/" in os.readlink(f"/proc/self/fd/{number}"):  # as on a shared file system without locks
        raise OSError(95, "Operation not supported")
    true_flock(file, operation)


true_flock = fcntl.flock
fcntl.flock = flock
"""
SETTINGS = ("run.num_steps=50", "report.tensorboard=false", "report.samples_per_step=100", "checkpoint.every=1")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run's folder with the run that was alone, and a module that makes a process believe in another node."""
    path = tmp_path_factory.mktemp("small")
    write_small_run(path, model={"num_layers": 2, "spare_tokens": 1}, eval=None)
    (path / "node").mkdir()
    (path / "node/sitecustomize.py").write_text(NODE)
    launch(path, 2, "run.name=alone", *SETTINGS)
    return path


@pytest.mark.slow
@pytest.mark.timeout(900, method="signal")
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kinds", ["local local", "torchrun torchrun", "local torchrun", "node-1 node-2"])
def test_of_two_launches_one_goes_on_and_the_other_says_so(small: Path, kinds: str, seed: int) -> None:
    name = f"{kinds.replace(' ', '-')}-{seed}"
    settings = [str(small / "c.toml"), f"run.name={name}", *SETTINGS]
    launches = []
    for number, kind in enumerate(kinds.split()):
        local = [sys.executable, "-m", "spmdrl.tools.local", "spmdrl.train", *settings]
        node = {"NODE": kind, "PYTHONPATH": f"{small}/node:{os.environ.get('PYTHONPATH', '')}"}
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | (node if kind.startswith("node") else {})
        with (small / f"{name}-{number}.txt").open("w") as output:
            command = torchrun_command(2, *settings) if kind == "torchrun" else local
            launches.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        if number == 0:
            time.sleep(random.Random(name).uniform(0.0, 6.0))
    try:
        codes = [process.wait(2 * LIMIT_S) for process in launches]
    finally:
        for process in launches:
            process.kill()
    outputs = [(small / f"{name}-{number}.txt").read_text() for number in range(2)]
    refused = [number for number in range(2) if f"{small}/runs/{name} is in use by " in outputs[number]]
    assert len(refused) == 1, (codes, outputs)
    assert codes[1 - refused[0]] == 0, outputs
    assert codes[refused[0]] == (1 if kinds.split()[refused[0]] == "torchrun" else 2), "torchrun itself ends with 1"
    alone, run = small / "runs/alone", small / "runs" / name
    assert_same_weights(run, alone)
    assert steady_rows(run) == steady_rows(alone)
    assert sample_rows(run) == sample_rows(alone)
    assert saved_steps(run / "checkpoints") == saved_steps(alone / "checkpoints")
