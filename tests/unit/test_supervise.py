"""From the command line to the ranks and back: requests to stop, last words, exit codes, and jobs of SLURM."""

from __future__ import annotations

import dataclasses
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import pytest

from spmdrl.faults import slurm, supervise
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.forked import Forked
from spmdrl.faults.lock import owned
from spmdrl.faults.rank_status import own_host
from spmdrl.faults.slurm import SlurmJob, after, job_of
from spmdrl.faults.supervise import (
    Commands,
    Ending,
    Requests,
    Starter,
    ask_to_stop,
    conclude,
    end_at_once,
    launch,
    tell,
)
from spmdrl.faults.verdict import (
    EXIT_HANG,
    EXIT_INTERRUPTED,
    EXIT_LOST_RANK,
    EXIT_REQUEUE,
    EXIT_USER_ERROR,
    ErrorReport,
    claim,
    write_requeue,
)
from spmdrl.faults.verdict import Requeue as Requeued

# Stands for spmdrl.train: --dry-run is the check; otherwise it is what the ranks do, which `PROGRAM` says.
MODULE = """
import os, signal, sys, time
from pathlib import Path

exec(os.environ.get("IMPORTS", ""))

def prepare(argv):
    exec(os.environ.get("PREPARES", ""))

def main(argv):
    if "--dry-run" in argv:
        exec(os.environ.get("CHECK", ""))
        print("# run folder\\nrun\\n")
    else:
        exec(os.environ["PROGRAM"])
    return 0

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
UNTIL_STOP = """
Path("run/started").touch()
while not Path("run/stop").exists():
    time.sleep(0.02)
print(Path("run/stop").read_text())
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run whose program is `MODULE`."""
    (tmp_path / "stand_in.py").write_text(MODULE)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path / "run"


def commands_of(*arguments: str) -> AbstractContextManager[Starter]:
    return nullcontext(Commands(module="stand_in", arguments=arguments, num_ranks=1, command=[sys.executable]))


def forks_of(*arguments: str) -> AbstractContextManager[Starter]:
    return Forked("stand_in", arguments, num_ranks=1)


Start = Callable[..., AbstractContextManager[Starter]]


@pytest.fixture(params=[commands_of, forks_of])
def starter_of(request: pytest.FixtureRequest) -> Start:
    """Either way to start the check and the rank: what a user sees is the same."""
    return request.param


@pytest.fixture
def start(starter_of: Start, run: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ending]:
    """Launches the stand-in, whose only rank does what a program says."""

    def start(program: str, *, check: str = "") -> Ending:
        monkeypatch.setenv("PROGRAM", program)
        monkeypatch.setenv("CHECK", check)
        with Requests() as requests, starter_of("c.toml") as starter:
            return launch(starter, requests)

    return start


# Launches whose signals are sent to this program must not be this process.
PROGRAM = """
from __future__ import annotations
import signal
import sys
from contextlib import nullcontext
from spmdrl.faults.forked import Forked
from spmdrl.faults.supervise import Commands, Requests, launch, tell

{definition}
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
signal.signal(signal.SIGINT, signal.default_int_handler)  # so do shells for `make test &`
with Requests() as requests, {name}("c.toml") as starter:
    sys.exit(tell(launch(starter, requests)))
"""


def popen(starter_of: Start) -> subprocess.Popen[str]:
    """A launch in a process of its own, as a terminal starts it: these tests may run where Ctrl-C is ignored."""
    program = PROGRAM.format(definition=inspect.getsource(starter_of), name=starter_of.__name__)
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture
def started(starter_of: Start, run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A launch in a process of its own, whose rank runs until the file `stop` is there."""
    monkeypatch.setenv("PROGRAM", UNTIL_STOP)
    process = popen(starter_of)
    deadline = time.monotonic() + 30
    while not (run / "started").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    yield process
    end_at_once(process.pid)
    process.communicate()


@pytest.mark.parametrize(
    "number",
    [
        *(signal.SIGTERM, signal.SIGINT),
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGUSR1, signal.SIGHUP)),
    ],
)
def test_a_request_becomes_the_file_stop_and_not_the_end_of_the_ranks(
    started: subprocess.Popen[str], number: signal.Signals
) -> None:
    started.send_signal(number)
    printed, told = started.communicate(timeout=30)
    assert printed == ("Ctrl-C\n" if number == signal.SIGINT else f"{number.name}\n")
    assert ("Ctrl-C again ends it at once" in told) == (number == signal.SIGINT)
    assert started.returncode == 0, "the stand-in leaves no word that it has stopped"


def test_ranks_find_the_file_stop_with_its_reason_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, seen, write = FaultFiles(tmp_path), [], Path.write_text

    def write_slowly(path: Path, text: str, encoding: str) -> int:
        path.touch()
        seen.append(files.stop.exists())
        return write(path, text, encoding)

    monkeypatch.setattr(Path, "write_text", write_slowly)
    ask_to_stop(files, signal.SIGTERM)
    assert seen == [False] and files.stop.read_text() == "SIGTERM" and os.listdir(tmp_path) == ["stop"]


def test_a_second_ctrl_c_ends_everything_at_once(run: Path, started: subprocess.Popen[str]) -> None:
    (run / "checkpoints/step-00000004").mkdir(parents=True)
    (run / "checkpoints/step-00000005.unfinished").mkdir()
    processes = psutil.Process(started.pid).children(recursive=True)
    assert processes
    for one in processes:  # it does not even see the first request
        one.suspend()
    started.send_signal(signal.SIGINT)
    while not (run / "stop").exists():
        time.sleep(0.01)
    started.send_signal(signal.SIGINT)
    told = started.communicate(timeout=30)[1]
    assert started.returncode == EXIT_INTERRUPTED
    assert told.splitlines()[-1] == "interrupted; the same command goes on after step 4"
    assert not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.parametrize("code", [EXIT_USER_ERROR, EXIT_LOST_RANK, EXIT_HANG, EXIT_INTERRUPTED])
def test_a_terminal_whose_display_was_killed_shows_its_cursor(
    code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = code != EXIT_USER_ERROR
    assert tell(Ending(code=code, text="why")) == code
    assert capsys.readouterr() == ("", "why\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tell(Ending(code=code, text="why"))
    assert capsys.readouterr() == ("\x1b[?25h\n" if killed else "", "why\n")


@pytest.mark.parametrize("moment", ["IMPORTS", "CHECK"])
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.slow), (signal.SIGINT, 130)],
)
def test_a_request_during_the_check_ends_it_with_a_word(
    starter_of: Start, run: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, moment: str
) -> None:
    """Also while the process that forks the ranks imports what they need."""
    monkeypatch.setenv(moment, "Path('run/begun').touch(); time.sleep(60)")
    process = popen(starter_of)
    while not (run / "begun").exists():
        assert process.poll() is None
        time.sleep(0.01)
    processes = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    told = process.communicate(timeout=30)[1]
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert told == f"stopped by {name} while the settings were being checked: nothing was started\n"
    assert process.returncode == code
    assert processes and not psutil.wait_procs(processes, timeout=10)[1]


def test_a_request_before_the_check_is_not_forgotten(
    starter_of: Start, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECK", "time.sleep(60)")
    with Requests() as requests, starter_of() as starter:
        os.kill(os.getpid(), signal.SIGUSR1)
        ending = launch(starter, requests)
    assert (ending.code, ending.reason, ending.requested) == (EXIT_REQUEUE, "SIGUSR1", True)


def test_a_check_that_fails_starts_nothing(start: Callable[..., Ending], run: Path) -> None:
    assert start("Path('run/started').touch()", check="sys.exit(2)") == Ending(code=EXIT_USER_ERROR)
    assert not (run / "started").exists()


def test_the_folder_of_another_launch_starts_nothing(start: Callable[..., Ending], run: Path) -> None:
    with owned(run):
        ending = start("Path('run/started').touch()")
    assert ending.code == EXIT_USER_ERROR and ending.text.startswith("cannot start: the run folder ")
    assert not (run / "started").exists()


def test_what_the_check_prints_is_for_those_who_ask_for_a_dry_run(
    start: Callable[..., Ending], capfd: pytest.CaptureFixture[str]
) -> None:
    assert start("print('a rank')") == Ending(code=0)
    assert capfd.readouterr() == ("a rank\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_ranks_that_are_ended_before_they_have_met_do_not_end_without_a_word(
    start: Callable[..., Ending], number: signal.Signals
) -> None:
    ending = start(f"os.kill(os.getpid(), signal.{number.name})")
    assert ending.text.startswith(f"the ranks were ended by {number.name} before they had joined each other")
    assert (ending.code, ending.requested, ending.advanced) == (EXIT_REQUEUE, False, False)


def test_exit_codes_of_the_ranks_are_those_of_the_launch(start: Callable[..., Ending]) -> None:
    assert start("sys.exit(0)").code == 0
    assert start("sys.exit(3)") == Ending(code=3)
    assert start("os.kill(os.getpid(), 9)") == Ending(code=137)
    assert start("sys.exit(int(os.environ['SPMDRL_SUPERVISED']) + 5)").code == 6


def test_what_a_program_prepares_is_there_in_the_check_and_in_every_rank(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREPARES", "sys.prepared = (os.getpid(), argv)")
    note = "Path('run', '{}-' + str(os.getpid())).write_text(repr(sys.prepared))"
    monkeypatch.setenv("CHECK", note.format("check"))
    monkeypatch.setenv("PROGRAM", note.format("rank"))
    with Requests() as requests, Forked("stand_in", ["c.toml", "optim.lr=1"], num_ranks=2) as starter:
        assert launch(starter, requests).code == 0
    notes = [path for path in run.iterdir() if path.name.startswith(("check-", "rank-"))]
    assert len(notes) == 3
    (prepared,) = {note.read_text() for note in notes}
    assert prepared.endswith(", ('c.toml', 'optim.lr=1'))")
    assert not any(f"({note.name.partition('-')[2]}," in prepared for note in notes), "it was another process"


def test_forked_ranks_meet_and_their_end_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kill_one = "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)"
    note = "Path('run', '-'.join(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'SPMDRL_SUPERVISED'))).touch()"
    monkeypatch.setenv("PROGRAM", f"{note}\n{kill_one}")
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with Requests() as requests, Forked("stand_in", ["c.toml"], num_ranks=2) as starter:
        assert launch(starter, requests).code == 137
    assert not os.listdir(temporary)
    assert {"0-2-1", "1-2-1"} <= {path.name for path in run.iterdir()}
    told = capfd.readouterr().err
    assert told.startswith("rank 1 (pid ") and told.endswith(") was ended by SIGKILL\n")


def test_a_launch_advances_when_it_saves_a_step(start: Callable[..., Ending]) -> None:
    save = "Path('run/checkpoints/step-%08d').mkdir(parents=True, exist_ok=True)"
    for step, advanced in ((0, False), (1, True), (1, False)):
        assert start(save % step).advanced == advanced


def test_a_command_that_outlives_the_failure_of_its_ranks_is_ended(
    start: Callable[..., Ending], monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun waits without an end for a node whose part of the step is gone."""
    monkeypatch.setattr(supervise, "LOOK_S", 0.1)
    monkeypatch.setattr(supervise, "END_S", 0.2)
    begun = time.monotonic()
    assert start("Path('run/error.json').write_text('{}'); time.sleep(60)").code == 137
    assert time.monotonic() - begun < 30


def test_what_a_rank_has_said_goes_before_what_became_of_the_command(tmp_path: Path) -> None:
    files = FaultFiles(tmp_path)
    requeued = Requeued(launch="one", step=3, num_steps=9, given_up=False, reason="SIGTERM", again=True)
    write_requeue(files, requeued)
    assert conclude(files, 143)[1:] == (EXIT_REQUEUE, "SIGTERM")
    lost = {"rank": 0, "num_ranks": 1, "host": own_host(), "pid": 1, "step": 2, "phase": "update"}
    claim(files, ErrorReport(launch="one", kind="lost", message="rank 1 is gone", **lost))
    assert conclude(files, 143) == ("rank 1 is gone", EXIT_LOST_RANK, "")


@pytest.mark.parametrize(("program", "code"), [("sys.exit(4)", 4), ("os.kill(os.getpid(), 9)", 137)])
def test_torchrun_ends_with_the_code_of_the_rank_and_without_its_own_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], program: str, code: int
) -> None:
    (tmp_path / "rank.py").write_text(f"import os, sys\n{program}")
    options = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "1"]
    command = [sys.executable, "-m", "spmdrl.faults.torchrun", *options, str(tmp_path / "rank.py")]
    (tmp_path / "temporary").mkdir()
    places = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=places)
    assert done.returncode == code
    assert not os.listdir(tmp_path / "temporary")
    assert done.stdout == "" and "Traceback" not in done.stderr
    assert ("was ended by SIGKILL" in done.stderr) == (code == 137)
    assert len(done.stderr.splitlines()) == (code == 137)


ALLOCATION = {
    "SLURM_JOB_ID": "12123",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_CPUS_ON_NODE": "96",
    "SLURM_GPUS_ON_NODE": "8",
}


class Stubs:
    """`scontrol`, `nvidia-smi` and `srun` that only write down how they were called, first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, *, prints: str = "", exit_code: int = 0) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>"{self.folder}/calls"\nprintf "{prints}"\nexit {exit_code}\n')
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = Stubs(tmp_path)
    found.add("scontrol", prints="node7\\nnode8\\n")
    found.add("nvidia-smi")
    return found


def test_a_job_starts_one_torchrun_a_node_with_the_gpus_that_slurm_has_granted(stubs: Stubs) -> None:
    job = job_of(ALLOCATION)
    assert job.num_ranks == 16
    command = job.command
    assert command[0] == "srun" and "--gres=gpu:8" in command and "--cpus-per-task=96" in command
    assert command[-8:] == [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "8",
        "--master-addr",
        "node7",
        "--master-port",
        "20123",
    ]
    assert max(int(job_of(ALLOCATION | {"SLURM_JOB_ID": str(n)}).command[-1]) for n in (11999, 12000)) < FIRST_EPHEMERAL


FIRST_EPHEMERAL = 32768  # of Linux, unless a machine says otherwise


def test_a_job_on_nodes_whose_gpus_slurm_does_not_count_asks_the_driver(stubs: Stubs) -> None:
    stubs.add("nvidia-smi", prints="GPU 0: a\\nGPU 1: b\\n")
    job = job_of({key: value for key, value in ALLOCATION.items() if "GPU" not in key})
    assert job.ranks_per_node == 2
    assert not [option for option in job.command if option.startswith("--gres")]


def test_a_job_without_a_gpu_says_what_to_ask_for(stubs: Stubs) -> None:
    without = {key: value for key, value in ALLOCATION.items() if "GPU" not in key}
    with pytest.raises(ValueError, match=r"no GPU.*--gres=gpu:8.*NPROC"):
        job_of(without)
    assert job_of(without | {"NPROC": "2"}).num_ranks == 4
    with pytest.raises(ValueError, match="no job of SLURM"):
        job_of({})


def test_an_array_job_runs_as_many_runs(stubs: Stubs) -> None:
    job = job_of(ALLOCATION | {"SLURM_ARRAY_TASK_ID": "3"})
    assert job.arguments(["c.toml", "run.name=a-%a", "run.seed=%a"]) == ["c.toml", "run.name=a-3", "run.seed=3"]
    with pytest.raises(ValueError, match=r"run\.name=NAME-%a"):
        job.arguments(["c.toml", "run.seed=%a"])
    assert job_of(ALLOCATION).arguments(["run.name=100%a"]) == ["run.name=100%a"]


@pytest.fixture
def job(stubs: Stubs) -> SlurmJob:
    return job_of(ALLOCATION)


def stopped(**changes: object) -> Ending:
    return Ending(**({"code": EXIT_REQUEUE, "reason": "SIGUSR1", "requested": True, "advanced": True} | changes))


def test_a_job_goes_back_into_the_queue_only_if_that_brings_it_further(stubs: Stubs, job: SlurmJob) -> None:
    assert after(job, stopped()) == "job 12123 is put back into the queue"
    assert stubs.calls[-1] == "scontrol requeue 12123"
    before = stubs.calls
    assert "it has saved no step" in after(job, stopped(advanced=False))
    assert "--time" in after(job, stopped(advanced=False))
    assert after(job, stopped(reason="SIGTERM")) == "", "scancel"
    assert after(job, Ending(code=0)) == after(job, Ending(code=EXIT_USER_ERROR)) == ""
    assert stubs.calls == before
    stubs.add("scontrol", exit_code=1)
    assert "could not be put back" in after(job, stopped())


def test_a_job_whose_ranks_alone_were_told_to_stop_begins_once_more(stubs: Stubs, job: SlurmJob) -> None:
    """It was preempted, or a signal of its last life came late: not even the loss of all work is the job's doing."""
    for advanced in (True, False):
        ending = stopped(reason="SIGTERM", requested=False, advanced=advanced)
        assert after(job, ending) == "job 12123 is put back into the queue"
    often = dataclasses.replace(job, restarts=slurm.MOST_RESTARTS)
    told = after(often, stopped(reason="SIGTERM", requested=False, advanced=False))
    assert "is not put back" in told and "--time" not in told


@pytest.mark.parametrize("code", [EXIT_LOST_RANK, EXIT_HANG])
def test_a_job_that_has_lost_a_node_goes_back_before_slurm_has_noticed(stubs: Stubs, job: SlurmJob, code: int) -> None:
    stubs.add("sinfo")
    assert after(job, Ending(code=code)) == "", "all nodes answer: the rank has ended by itself"
    stubs.add("sinfo", prints="node8\\nnode8\\n")  # once for each partition
    assert after(job, Ending(code=code)) == "SLURM gets no answer from node8: job 12123 is put back into the queue"
    assert stubs.calls[-2:] == [
        "sinfo --noheader --dead --Node --nodes=node[7-8] --format=%N",
        "scontrol requeue 12123",
    ]
    assert after(job, Ending(code=code, requested=True)) == "", "SLURM has ended the job itself"
