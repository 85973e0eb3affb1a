"""Runs that are told to stop, that fail and that hang: saved and gone on with as if nothing had been, or told once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from spmdrl import train
from spmdrl.checkpoint.manifest import folder_of, newest_step
from spmdrl.faults.files import FaultFiles, read_json
from spmdrl.faults.verdict import EXIT_LOST_RANK, EXIT_REQUEUE, read_error, read_requeue
from spmdrl.faults.watch import StopRequests, Watch
from spmdrl.report import Report
from spmdrl.sft import main as sft
from spmdrl.train import main
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import assert_same_weights, steady_rows, torchrun_command, without_curves, write_sft_config

# Each launch goes on from the one before: where it is told to stop, and the step that is saved. Steps 2, 4, 6 and the
# last are evaluated.
STOPS = {
    "some": ((1, "rollout", 0), (2, "logprobs", 1), (2, "update", 2), (3, "refit", 3)),
    "every": (
        (1, "rollout", 0),
        (1, "reward", 0),
        (2, "batch", 1),
        (2, "switch", 1),
        (3, "probe", 2),
        (4, "logprobs", 3),
        (4, "update", 4),
        (6, "refit", 6),
        (7, "update", 7),
        (8, "eval", 8),
        (9, "save", 9),
        (11, "refit", 11),
    ),
}
SETTINGS = (
    "checkpoint.every=1",
    "eval.num_prompts=4",
    "loss.kl_coef=0.0",
    "report.tensorboard=false",
)
ENDLESS = ("run.num_steps=100000", "export.at_end=false", "report.tensorboard=false")
END_LIMIT_S = 60.0  # for an idle machine and a busy one


def plain(program: Any, argv: list[str]) -> int:
    """Run one rank's program; `evaluations` in the run's folder gets the step of each one."""
    show = Report.eval

    def note_and_show(report: Report, step: int, scalars: Any, **others: Any) -> None:
        if report._folder is not None:
            with (report._folder.path / "evaluations").open("a") as file:
                file.write(f"{step}\n")
        show(report, step, scalars, **others)

    with mock.patch.object(Report, "eval", note_and_show):
        return without_curves(program, argv)


def signalled(program: Any, argv: list[str], step: int, phase: str, rank: int = 1) -> int:
    """The same; one rank gets SIGUSR1 as it enters a phase of a step."""
    enter = Watch.enter

    def enter_and_signal(watch: Watch, entered: str) -> None:
        enter(watch, entered)
        if (watch._heartbeat.status.step, entered) == (step, phase) and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGUSR1)

    with mock.patch.object(Watch, "enter", enter_and_signal):
        return plain(program, argv)


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, samples, every metric but those of time and memory; and nothing was evaluated twice."""
    assert_same_weights(one, other)
    assert steady_rows(one) == steady_rows(other)
    for name in ("samples.jsonl", "evaluations"):
        assert (one / name).read_text() == (other / name).read_text(), name


def launch(num_ranks: int, argv: list[str]) -> None:
    """A run as torchrun would start it, without the seconds that its imports take."""
    assert set(run_ranks(num_ranks, plain, main, argv, timeout_s=200.0)) == {0}


@pytest.mark.slow
@pytest.mark.parametrize(("which", "saves"), [("some", 0), ("every", 1)], ids=["some", "every"])
def test_a_run_that_is_stopped_in_any_phase_is_bitwise_the_run_that_is_not(
    folder: Path, which: str, saves: int
) -> None:
    """One rank of two is told: before the update a step is given up, later it is finished but for its evaluation. The
    prompts of a step depend on those of the step before it."""
    stops = STOPS[which]
    settings = (f"run.num_steps={stops[-1][0]}", f"checkpoint.every={saves}", "rollout.dynamic_sampling=true")
    argv = [str(folder / "c.toml"), *SETTINGS, *settings]
    unstopped, run = (folder / f"runs/{name}-{which}" for name in ("unstopped", "stopped"))
    launch(2, [*argv, f"run.name={unstopped.name}"])
    argv.append(f"run.name={run.name}")
    for step, phase, saved in stops:
        codes = run_ranks(2, signalled, main, argv, step, phase, timeout_s=200.0)
        assert set(codes) == {0}, phase
        requeue = read_requeue(FaultFiles(run))
        assert requeue is not None and requeue.reason == "SIGUSR1" and requeue.again, phase
        assert (requeue.step, requeue.given_up) == (saved, saved < step), phase
        assert newest_step(run / "checkpoints") == saved and folder_of(run / "checkpoints", saved).is_dir(), phase
        assert not (run / "hf").exists(), phase
    launch(2, argv)
    assert read_requeue(FaultFiles(run)) is None
    assert_same_run(unstopped, run)


@pytest.mark.slow
def test_an_engine_rank_that_is_told_stops_the_run(folder: Path) -> None:
    settings = ("rollout.num_ranks=1", 'rollout.placement="disaggregated"', "rollout.max_staleness=0")
    argv = [str(folder / "c.toml"), *SETTINGS, *settings, "run.num_steps=4", "checkpoint.every=0"]
    launch(2, [*argv, "run.name=apart-unstopped"])
    run = folder / "runs/apart-stopped"
    stopped = [*argv, "run.name=apart-stopped"]
    assert set(run_ranks(2, signalled, main, stopped, 2, "reward", timeout_s=200.0)) == {0}
    requeue = read_requeue(FaultFiles(run))
    assert requeue is not None and requeue.step == 1 and requeue.given_up
    # A rank that trains, when the engine has nothing more to sample and its evaluation is not waited for.
    assert set(run_ranks(2, signalled, main, stopped, 4, "refit", 0, timeout_s=200.0)) == {0}
    requeue = read_requeue(FaultFiles(run))
    assert requeue is not None and requeue.step == 4 and not requeue.given_up
    launch(2, stopped)
    assert_same_run(folder / "runs/apart-unstopped", run)


def test_engines_that_are_ahead_are_dismissed(folder: Path) -> None:
    settings = ("rollout.num_ranks=1", 'rollout.placement="disaggregated"', "rollout.max_staleness=2")
    settings = (*settings, "correction.kind=tis")
    argv = [str(folder / "c.toml"), *SETTINGS, *settings, "run.num_steps=6", "run.deterministic=false"]
    argv.append("run.name=ahead-stopped")
    assert set(run_ranks(2, signalled, main, argv, 2, "rollout", timeout_s=200.0)) == {0}
    requeue = read_requeue(FaultFiles(folder / "runs/ahead-stopped"))
    assert requeue is not None and requeue.step == 1 and requeue.given_up
    launch(2, argv)
    assert read_requeue(FaultFiles(folder / "runs/ahead-stopped")) is None


@pytest.mark.slow
def test_fine_tuning_stops_and_goes_on(folder: Path) -> None:
    rows = [{"prompt": f"{i} + 1 =", "answer": "", "response": str(i + 1)} for i in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": f"{folder}/rows.jsonl", "response_column": "response"}
    config = write_sft_config(
        folder,
        name="sft.toml",
        run={"seed": None},
        data={"sources": [source]},
        sft={"sequences_per_step": 4, "max_response_tokens": 8},
        pack={"max_tokens_per_micro_batch": 64},
        checkpoint=None,
    )
    assert set(run_ranks(2, plain, sft, [str(config), "run.name=sft-unstopped"], timeout_s=200.0)) == {0}
    stopped = [str(config), "run.name=sft-stopped"]
    assert set(run_ranks(2, signalled, sft, stopped, 2, "update", timeout_s=200.0)) == {0}
    requeue = read_requeue(FaultFiles(folder / "runs/sft-stopped"))
    assert requeue is not None and requeue.step == 2
    assert set(run_ranks(2, plain, sft, stopped, timeout_s=200.0)) == {0}
    assert_same_weights(folder / "runs/sft-unstopped", folder / "runs/sft-stopped")


def with_a_long_second_step(argv: list[str]) -> int:
    """Run one rank's program, by a clock on which step 2 takes two hours."""
    end_step, ends = StopRequests.end_step, iter((0.0, 0.0, 7200.0))

    def end_later(requests: StopRequests, now: float) -> None:
        end_step(requests, now + next(ends))

    with mock.patch.object(StopRequests, "end_step", end_later):
        return plain(main, argv)


def test_no_step_is_begun_that_would_end_too_late(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deadline = datetime.now() + timedelta(hours=1)
    argv = [str(folder / "c.toml"), *ENDLESS, "run.name=timed", f'run.stop_before="{deadline.isoformat()}"']
    assert set(run_ranks(2, with_a_long_second_step, argv, timeout_s=200.0)) == {0}
    requeue = read_requeue(FaultFiles(folder / "runs/timed"))
    assert requeue is not None and requeue.reason.startswith("run.stop_before = ") and not requeue.again
    assert requeue.step == 2 and (folder / "runs/timed/checkpoints/step-00000002").is_dir()
    assert main([*argv[:-1], "run.stop_before=2001-01-01"]) == 2
    assert "run.stop_before = 2001-01-01T00:00 is in the past" in capsys.readouterr().err


def failing(argv: list[str]) -> int:
    """Run one rank's program; the update of the second rank fails in step 2."""
    update = train.update

    def update_or_fail(*arguments: Any, step: int, **settings: Any) -> Any:
        if step == 2 and os.environ["RANK"] == "1":
            raise ArithmeticError("of this rank alone")
        return update(*arguments, step=step, **settings)

    with mock.patch.object(train, "update", update_or_fail):
        return plain(main, argv)


def test_a_failure_of_one_rank_is_the_one_cause(folder: Path) -> None:
    argv = [str(folder / "c.toml"), *SETTINGS, "run.name=failed", "run.num_steps=4"]
    assert run_ranks(2, failing, argv, timeout_s=200.0) == [EXIT_LOST_RANK, 1]
    files = FaultFiles(folder / "runs/failed")
    report = read_error(files)
    assert report is not None
    assert (report.kind, report.rank, report.step, report.phase) == ("error", 1, 2, "update")
    assert report.message == "ArithmeticError: of this rank alone" and "update_or_fail" in report.traceback
    assert report.log_lines[-1].endswith("step 2")
    assert "a secondary error" in files.log_of(0).read_text()


class Job:
    """A run on 2 ranks by torchrun, and its processes."""

    def __init__(self, folder: Path, name: str, *settings: str, supervised: bool) -> None:
        self.files = FaultFiles(folder / "runs" / name)
        arguments = [str(folder / "c.toml"), f"run.name={name}", *settings]
        launcher = [sys.executable, "-m", "spmdrl.tools.local", "spmdrl.train"]
        command = [*launcher, *arguments] if supervised else torchrun_command(2, *arguments)
        self._output = (folder / f"{name}.txt").open("w+")
        self.process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return Path(self._output.name).read_text()

    def wait_for(self, rank: int, step: int, phase: str) -> int:
        """Until a rank is in a phase, of this step or a later one; returns its process."""
        deadline = time.monotonic() + 200.0
        while True:
            status = read_json(self.files.status_of(rank))
            if status is not None and status["step"] >= step and status["phase"] == phase:
                return status["pid"]
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.01)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        for process in (*self.descendants(), self.process) if self.process.poll() is None else ():
            process.kill()
        self._output.close()


@contextmanager
def job(folder: Path, name: str, *settings: str, supervised: bool) -> Iterator[Job]:
    started = Job(folder, name, *settings, supervised=supervised)
    try:
        yield started
    finally:
        started.end()


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end within a few seconds."""
    return not psutil.wait_procs(processes, timeout=10)[1]


def terminated(folder: Path, name: str) -> int:
    """End a launched job by SIGTERM; return the step that it has saved."""
    with job(folder, name, *ENDLESS, supervised=True) as run:
        run.wait_for(1, 2, "update")
        processes = run.descendants()
        run.process.terminate()
        assert run.process.wait(END_LIMIT_S) == EXIT_REQUEUE, run.output
        assert gone(processes), "processes are left"
    requeue = read_requeue(run.files)
    assert requeue is not None and requeue.reason == "SIGTERM"
    assert run.output.splitlines()[-1].startswith(f"stopped after step {requeue.step} of 100000 (SIGTERM)")
    assert "Traceback" not in run.output
    return requeue.step


@pytest.mark.slow
def test_sigterm_to_a_launched_job_saves_and_asks_to_be_started_again(folder: Path) -> None:
    saved = terminated(folder, "terminated")
    assert newest_step(folder / "runs/terminated/checkpoints") == saved >= 1


@pytest.mark.slow
def test_a_job_that_sigterm_ended_ends_as_one_that_was_never_stopped(folder: Path) -> None:
    last = f"run.num_steps={terminated(folder, 'resumed') + 1}"
    for name in ("resumed", "not-terminated"):
        launch(2, [str(folder / "c.toml"), *ENDLESS, f"run.name={name}", last, "export.at_end=true"])
    assert_same_weights(folder / "runs/not-terminated", folder / "runs/resumed")


@pytest.mark.slow
def test_sigusr1_to_one_rank_under_bare_torchrun_ends_all_with_0(folder: Path) -> None:
    with job(folder, "told", *ENDLESS, supervised=False) as run:
        rank = run.wait_for(1, 2, "rollout")
        processes = run.descendants()
        os.kill(rank, signal.SIGUSR1)
        assert run.process.wait(END_LIMIT_S) == 0, run.output
        assert gone(processes), "processes are left"
    requeue = read_requeue(run.files)
    assert requeue is not None and requeue.reason == "SIGUSR1" and requeue.step >= 1


def test_a_rank_that_is_stopped_in_a_collective_ends_the_job_by_name(folder: Path) -> None:
    """The hang drill."""
    with job(folder, "hung", *ENDLESS, "watchdog.timeout_s=6", supervised=True) as run:
        rank = run.wait_for(1, 2, "update")
        os.kill(rank, signal.SIGSTOP)
        processes = run.descendants()
        assert run.process.wait(END_LIMIT_S) == 5, run.output
        assert gone(processes), "processes are left"
    report = read_error(run.files)
    assert report is not None and report.kind == "hang" and report.rank == 1
    told = run.output[run.output.index("no rank has made progress for 6 s") :]
    assert f"pid {rank}) is not responding, in step {report.step}, {report.phase}" in told
    # Together when they are in the same place; a rank without stacks would be said not to have answered.
    assert "main thread of rank" in told and "in run_from_command_line" in told
    assert "no response" not in told
    for number in range(2):
        assert "in run_from_command_line" in run.files.log_of(number).read_text()
        assert run.files.flight_record_of(number).stat().st_size > 0
