"""Real runs with real processes that are killed: the job ends and says why, or goes on, and nothing is left over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.verdict import read_error
from spmdrl.tools import ps
from spmdrl.tools.tiny_model import save_tiny_model

END_LIMIT_S = 30.0
START_LIMIT_S = 240.0

CONFIG = """\
[run]
name = "{name}"
dir = "{runs}"
num_steps = {num_steps}
[model]
path = "{model}"
[data]
max_prompt_tokens = 24
[[data.sources]]
kind = "reasoning_gym"
task = "chain_sum"
params = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
prompt_template = "{{metadata[expression]}} ="
[rollout]
engine = "sglang"
prompts_per_step = 8
group_size = 4
max_response_tokens = 100
restart_engine = {restart}
[reward]
terms = [{{ kind = "exact" }}]
[optim]
lr = 1e-3
[pack]
max_tokens_per_micro_batch = 512
[export]
at_end = false
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, hidden_size=64, num_layers=2)
    return path


class Job:
    """A run on 2 ranks with an engine each, and its processes."""

    def __init__(self, folder: Path, model: Path, *, num_steps: int, restart: bool) -> None:
        self.run = folder / "runs/killed"
        config = folder / "c.toml"
        config.write_text(
            CONFIG.format(
                name="killed",
                runs=folder / "runs",
                model=model,
                num_steps=num_steps,
                restart=str(restart).lower(),
            )
        )
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        self._output = (folder / "output.txt").open("w+")
        self.process = subprocess.Popen(
            [*torchrun, "-m", "spmdrl.train", str(config)],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    @property
    def output(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    def rows(self) -> list[dict]:
        """The steps that have ended; rows are written whole."""
        path = self.run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while len(self.rows()) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "spmdrl.train" in " ".join(p.cmdline())]

    def scheduler(self) -> psutil.Process:
        return next(p for p in self.descendants() if "sglang::scheduler" in " ".join(p.cmdline()))

    def segments(self) -> set[Path]:
        """The shared memory with a name that the processes of the run have mapped."""
        found = set()
        for process in self.descendants():
            with suppress(OSError):  # a process that has just ended
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                found |= {Path(line.split()[5]) for line in lines if "/dev/shm/sgl" in line}
        return found

    def end(self) -> None:
        for process in (*self.descendants(), self.process) if self.process.poll() is None else ():
            process.kill()
        self._output.close()


@contextmanager
def job(folder: Path, model: Path, *, num_steps: int, restart: bool = False) -> Iterator[Job]:
    started = Job(folder, model, num_steps=num_steps, restart=restart)
    try:
        yield started
    finally:
        started.end()


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end within a few seconds."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


def test_a_killed_scheduler_ends_the_job_with_the_cause(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(tmp_path, model, num_steps=1000) as run:
        run.wait_for_step(2)
        assert ps.main([str(run.run), "dump"]) == 0
        for rank, stacks in enumerate(capsys.readouterr().out.split("== rank ")[1:]):
            assert stacks.startswith(str(rank)) and "in run_from_command_line" in stacks
            assert "scheduler.py" in stacks, "those of its engine too"
        processes, scheduler = run.descendants(), run.scheduler()
        scheduler.kill()
        assert run.process.wait(END_LIMIT_S) != 0
        assert gone(processes), "processes are left"
        assert run.output.count("failed in step") == 1, run.output
        report = read_error(FaultFiles(run.run))
        assert report is not None and report.kind == "error" and report.message in run.output
        assert f"EngineDied: SGLang's scheduler_0 (pid {scheduler.pid}) was killed by SIGKILL" in run.output


def test_a_killed_rank_ends_the_job_with_the_cause(tmp_path: Path, model: Path) -> None:
    with job(tmp_path, model, num_steps=1000) as run:
        run.wait_for_step(2)
        processes, rank = run.descendants(), run.ranks()[1]
        rank.kill()
        assert run.process.wait(END_LIMIT_S) != 0
        assert gone(processes), "processes are left"
        assert run.output.count(f"pid {rank.pid}) has ended without a word in step") == 1, run.output
        assert "failed in step" not in run.output
        assert f"Signal 9 (SIGKILL) received by PID {rank.pid}" in run.output


@pytest.mark.parametrize("delay_s", [0.0, *(pytest.param(n / 4, marks=pytest.mark.slow) for n in range(1, 7))])
def test_an_engine_that_is_started_again_lets_the_run_go_on(tmp_path: Path, model: Path, delay_s: float) -> None:
    with job(tmp_path, model, num_steps=8, restart=True) as run:
        run.wait_for_step(2)
        processes, scheduler = run.descendants(), run.scheduler()
        segments = run.segments()
        time.sleep(delay_s)
        scheduler.kill()
        run.wait_for_step(7)
        segments |= run.segments()
        assert run.process.wait(START_LIMIT_S) == 0, run.output
        assert gone(processes), "processes are left"
        assert len(segments) > 2 and not [path for path in segments if path.exists()], "shared memory is left"
        assert f"(pid {scheduler.pid}) was killed by SIGKILL; it is started again" in run.output
        rows = run.rows()
        assert [row["step"] for row in rows] == list(range(1, 9))
        assert sum(row["rollout/engine_restarts_count"] for row in rows) == 1
        assert all(row["mismatch/max_abs_nats"] < 1e-4 for row in rows)
