"""Whatever process of a run is killed, nothing of the run is left, and the same command ends as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from spmdrl.report.files import read_rows
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers import hints
from tests.helpers.agents import script
from tests.helpers.small_run import (
    assert_same_weights,
    launch,
    steady_rows,
    torchrun_command,
    write_config,
    write_small_run,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800, method="signal")]
LEFT_S = 30.0  # the longest that anything may outlive the run
LIMIT_S = 400.0  # for what a quiet machine does within a minute
MARK = "SPMDRL_TEST_RUN"  # in the environment of every process of a run
SETTINGS = ("report.samples_per_step=0", "report.tensorboard=false", "run.num_steps=5", "checkpoint.every=1")
AGENT = """
message = chat([user(episode["prompt"])])
chat([user(episode["prompt"]), message, user(" 7;")])
print(json.dumps({"reward": sum(c.isdigit() for c in message["content"] or "") / 10}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orphans")
    write_small_run(path, model={"num_layers": 2, "spare_tokens": 1}, debug=None, **hints.TABLES)
    script(path, AGENT)
    (path / "sglang").mkdir()
    save_tiny_model(path / "sglang/model", hidden_size=128, num_layers=2)
    write_config(
        path / "sglang",
        run={"dir": f"{path}/runs"} | dict.fromkeys(("seed", "deterministic", "threads_per_rank")),
        rollout={"engine": "sglang", "max_response_tokens": 100},
        reward={"terms": [{"kind": "exact"}]},
        pack={"max_tokens_per_micro_batch": 512},
        eval=None,
        debug=None,
    )
    return path


def arguments_of(folder: Path, name: str, source: str) -> list[str]:
    """The configuration and settings of a run with environments, agents, or engines of SGLang."""
    config = folder / ("sglang/c.toml" if source == "sglang" else "c.toml")
    agent = json.dumps([sys.executable, "-I", "-S", f"{folder}/agent.py"])
    environments = {
        "class": (f'environment.source={{kind="class",name="{hints.__file__}:Hints"}}',),
        "agent": (f'environment.source={{kind="agent",command={agent}}}', 'environment.sandbox.mode="off"'),
    }
    return [str(config), f"run.name={name}", *SETTINGS, *environments.get(source, ())]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The run of the environment that nothing stopped."""
    launch(folder, 2, *arguments_of(folder, "whole", "class")[1:])
    return folder / "runs/whole"


@dataclass
class Watched:
    """A launch and every process that it has started, as far as seen."""

    launcher: subprocess.Popen[str]
    mark: str
    seen: set[psutil.Process] = field(default_factory=set)

    def look(self) -> list[psutil.Process]:
        """Return the processes of the run that are alive, the launcher first."""
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.launcher.pid)
            self.seen |= {launcher, *launcher.children(recursive=True)}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    self.seen.add(process)
        alive = [process for process in self.seen if is_alive(process)]
        return sorted(alive, key=lambda process: (process.pid != self.launcher.pid, process.create_time()))

    def left_after(self, seconds: float) -> list[psutil.Process]:
        """Return what is alive, as soon as that is nothing, or after a time."""
        until = time.monotonic() + seconds
        while (alive := self.look()) and time.monotonic() < until:
            time.sleep(0.5)
        return alive


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextmanager
def launched(command: list[str], mark: str, output: Path) -> Iterator[Watched]:
    with output.open("w") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark}
        launcher = subprocess.Popen(command, stdout=file, stderr=file, text=True, env=environment)
    watched = Watched(launcher, mark)
    try:
        yield watched
    finally:
        for process in watched.look():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.wait()


def has_saved(run: Path) -> bool:
    return any(row["step"] >= 1 for row in read_rows(run / "metrics.jsonl"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("start", ["local", "torchrun"])
@pytest.mark.parametrize("source", ["class", "agent", "sglang"])
def test_whatever_is_killed_nothing_is_left(folder: Path, whole: Path, start: str, source: str, seed: int) -> None:
    name = f"{start}-{source}-{seed}"
    run, output = folder / "runs" / name, folder / f"{name}.txt"
    if source == "sglang" and find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: make setup-sglang")
    settings = arguments_of(folder, name, source)
    local = [sys.executable, "-m", "spmdrl.tools.local", "spmdrl.train", *settings]
    command = local if start == "local" else torchrun_command(2, *settings)
    chance = random.Random(f"{name}")
    with launched(command, name, output) as first:
        until = time.monotonic() + LIMIT_S
        while not has_saved(run):
            assert first.launcher.poll() is None and time.monotonic() < until, output.read_text()
            time.sleep(0.05)
        time.sleep(chance.uniform(0.0, 1.0))
        alive = first.look()
        victim = alive[0] if seed == 0 else chance.choice(alive)
        named = f"{victim.pid} {' '.join(victim.cmdline())[:200]} of {len(alive)}"
        victim.kill()
        while first.launcher.poll() is None:
            assert time.monotonic() < until, f"neither ended nor finished after the end of {named}"
            first.look()
            time.sleep(1.0)
        left = first.left_after(LEFT_S)
        assert not left, f"after the end of {named}: {[(one.pid, one.cmdline()) for one in left]}"
    code = first.launcher.returncode
    print(f"{name}: killed {named}; exit code {code}")
    if code == 0:  # a worker was replaced, or it was over
        return
    with launched(command, name, output) as second:
        assert second.launcher.wait(LIMIT_S) == 0, output.read_text()
        assert not second.left_after(LEFT_S)
    if source == "class":
        assert_same_weights(run, whole)
        assert steady_rows(run) == steady_rows(whole)
