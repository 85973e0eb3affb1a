"""Real runs with real processes that are killed: the job ends and says why, or goes on, and nothing is left over."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import read_statuses
from spmdrl.faults.verdict import read_error
from spmdrl.tools import runs
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.engine_ranks import START_LIMIT_S
from tests.helpers.small_run import start_torchrun, write_config

END_LIMIT_S = 30.0
GENERATING_S = 0.2  # after the beginning of a rollout phase its requests run, for longer than this


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, hidden_size=128, num_layers=2)
    return path


class Job:
    """A run whose ranks have an engine each or share one, and its processes."""

    def __init__(
        self, folder: Path, model: Path, *, num_steps: int, restart: bool, num_ranks: int, tp_size: int
    ) -> None:
        self.run = folder / "runs/killed"
        rollout = {"engine": "sglang", "max_response_tokens": 100, "tp_size": tp_size, "restart_engine": restart}
        defaults = dict.fromkeys(("seed", "deterministic", "threads_per_rank"))
        config = write_config(
            folder,
            run={"name": "killed", "num_steps": num_steps} | defaults,
            model={"path": str(model)},
            rollout=rollout,
            reward={"terms": [{"kind": "exact"}]},
            loss=None,
            optim={"lr": 1e-3},
            pack={"max_tokens_per_micro_batch": 512},
            eval=None,
            checkpoint=None,
            export={"at_end": False},
            debug=None,
        )
        self._output = (folder / "output.txt").open("w+")
        self.process = start_torchrun(num_ranks, str(config), stdout=self._output, stderr=subprocess.STDOUT)

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

    def wait_for_phase(self, phase: str) -> None:
        """Until every rank has just begun it."""
        deadline, is_there, was_elsewhere = time.monotonic() + START_LIMIT_S, False, False
        while not (is_there and was_elsewhere):
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.002)
            is_there = {status.phase for status in read_statuses(FaultFiles(self.run))} == {phase}
            was_elsewhere |= not is_there

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "spmdrl.train" in " ".join(p.cmdline())]

    def schedulers(self) -> list[psutil.Process]:
        return [p for p in self.descendants() if "sglang::scheduler" in " ".join(p.cmdline())]

    def reward_workers(self) -> list[psutil.Process]:
        return [p for p in self.descendants() if "spmdrl.rewards.worker" in " ".join(p.cmdline())]

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
def job(
    folder: Path, model: Path, *, num_steps: int, restart: bool = False, num_ranks: int = 2, tp_size: int = 1
) -> Iterator[Job]:
    started = Job(folder, model, num_steps=num_steps, restart=restart, num_ranks=num_ranks, tp_size=tp_size)
    try:
        yield started
    finally:
        started.end()


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end within a few seconds."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not alive


@pytest.mark.slow
def test_a_job_that_is_told_to_stop_saves_with_its_engines(tmp_path: Path, model: Path) -> None:
    """torchrun passes SIGTERM on to all that its ranks have started."""
    with job(tmp_path, model, num_steps=1000) as run:
        run.wait_for_step(1)
        processes = run.descendants()
        run.wait_for_phase("rollout")
        run.process.terminate()
        run.process.wait(END_LIMIT_S)
        assert gone(processes), "processes are left"
        (stopped,) = re.findall(r"stopped after step (\d+) of 1000 \(SIGTERM\)", run.output)
        assert (run.run / f"checkpoints/step-{int(stopped):08d}").is_dir()
        assert "failed in step" not in run.output


@pytest.mark.slow
def test_a_killed_scheduler_ends_the_job_with_the_cause(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with job(tmp_path, model, num_steps=1000) as run:
        run.wait_for_step(1)
        assert runs.ps([str(run.run), "dump"]) == 0
        for rank, stacks in enumerate(capsys.readouterr().out.split("== rank ")[1:]):
            assert stacks.startswith(str(rank)) and "in run_from_command_line" in stacks
            assert "scheduler.py" in stacks, "those of its engine too"
        processes, (scheduler, _) = run.descendants(), run.schedulers()
        run.wait_for_phase("rollout")
        time.sleep(GENERATING_S)
        scheduler.kill()
        assert run.process.wait(END_LIMIT_S) != 0
        assert gone(processes), "processes are left"
        assert run.output.count("failed in step") == run.output.count(", rollout:\n") == 1, run.output
        assert ", in generate\n" in run.output
        report = read_error(FaultFiles(run.run))
        assert report is not None and report.kind == "error" and report.message in run.output
        assert f"EngineDied: SGLang's scheduler_0 (pid {scheduler.pid}) was killed by SIGKILL" in run.output


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_the_cause(tmp_path: Path, model: Path) -> None:
    with job(tmp_path, model, num_steps=1000) as run:
        run.wait_for_step(2)
        processes, rank = run.descendants(), run.ranks()[1]
        run.wait_for_phase("update")
        rank.kill()
        assert run.process.wait(END_LIMIT_S) != 0
        assert gone(processes), "processes are left"
        cause = rf"pid {rank.pid}\) ended without an error message in step \d+, update"
        assert len(re.findall(cause, run.output)) == 1, run.output
        assert "failed in step" not in run.output
        assert f"Signal 9 (SIGKILL) received by PID {rank.pid}" in run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "tp_size", "delay_s"),
    [(1, 1, 0.0), *((2, size, n / 4) for size, n in ((2, 1), *((1, n) for n in range(7))))],
)
def test_an_engine_that_is_started_again_lets_the_run_go_on(
    tmp_path: Path, model: Path, num_ranks: int, tp_size: int, delay_s: float
) -> None:
    """Of an engine on two devices, the one dies that the rank which leads it does not train on."""
    with job(tmp_path, model, num_steps=5, restart=True, num_ranks=num_ranks, tp_size=tp_size) as run:
        run.wait_for_step(2)
        processes, scheduler, workers = run.descendants(), run.schedulers()[-1], run.reward_workers()
        segments = run.segments()
        time.sleep(delay_s)
        scheduler.kill()
        run.wait_for_step(4)
        assert workers and run.reward_workers() == workers, "an engine that is ended takes nobody along"
        segments |= run.segments()
        assert run.process.wait(START_LIMIT_S) == 0, run.output
        assert gone(processes), "processes are left"
        assert len(segments) > num_ranks // tp_size, "engines before, and the one after"
        assert not [path for path in segments if path.exists()], "shared memory is left"
        killed = (
            f"(pid {scheduler.pid}) was killed by SIGKILL; " if tp_size == 1 else ""
        )  # or its neighbour, which fails
        assert f"{killed}it is started again" in run.output
        rows = run.rows()
        assert [row["step"] for row in rows] == list(range(1, 6))
        assert sum(row["rollout/engine_restarts_count"] for row in rows) == 1
        assert all(row["mismatch/max_abs_nats"] < 1e-4 for row in rows)
