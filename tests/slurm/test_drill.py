"""launch/slurm.sbatch, unmodified, on a cluster of SLURM itself: what it promises, and what goes wrong on clusters."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from spmdrl.checkpoint.places import newest_step
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import read_statuses
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.train import main
from tests.helpers.ranks import run_ranks
from tests.helpers.slurm_cluster import LIMIT_S, Cluster, Job, environment_of
from tests.helpers.slurm_drill import Drill
from tests.helpers.small_run import assert_same_weights, rows, without_curves

# "signal": what ends a drill that hangs must not end the cluster's fixtures with it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S, method="signal")]
TWO_NODES = ("--nodes=2",)
NOTICED = "SlurmdTimeout=20"  # of launch/slurm_cluster.sh
USUAL_S = 300  # SLURM's own, later than ranks that have lost one wait for each other
ENDLESS = ("run.num_steps=100000", "checkpoint.every=2", "eval.every=1000", "export.at_end=false")


class Run:
    """A run of the small model in a job, by its name."""

    def __init__(self, cluster: Cluster, folder: Path, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.arguments = [str(folder / "c.toml"), f"run.name={name}"]
        self.path = folder / "runs" / name
        self.files = FaultFiles(self.path)

    @property
    def saved(self) -> int:
        return newest_step(self.path / "checkpoints")

    def submit(self, *settings: str, options: tuple[str, ...] = TWO_NODES, **variables: str) -> Job:
        return self.cluster.submit(options, *self.arguments, *settings, **variables)

    def submit_and_wait(self, *, saved: int = 4, options: tuple[str, ...] = TWO_NODES) -> Job:
        """An endless run, when it has saved this step."""
        job = self.submit(*ENDLESS, options=options)
        job.wait_until(lambda: self.saved >= saved, "steps")
        return job

    def goes_on(self, job: Job, *, after: int, restarts: int = 1) -> None:
        """The job that was put back starts, and saves more steps than it had."""
        job.start_now()
        job.wait_for("RUNNING", restarts=restarts)
        job.wait_until(lambda: self.saved > after, "more steps")
        job.cancel()
        job.wait_for("CANCELLED")

    def goes_on_at_last(self, job: Job, *, after: int) -> int:
        """The same for a job that may be put back once more before it saves a step; returns how often it was."""

        def further() -> bool:
            facts = job.facts()
            if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
                job.start_now()
            return self.saved > after

        job.wait_until(further, "more steps")
        restarts = int(job.facts()["Restarts"])
        job.cancel()
        job.wait_for("CANCELLED")
        return restarts


def test_two_nodes_stop_before_the_time_limit_and_go_on_bit_for_bit(
    cluster: Cluster, folder: Path, drill: Drill
) -> None:
    run = Run(cluster, folder, "resumed")
    settings = ("run.num_steps=24", "checkpoint.every=8")
    job = run.submit(*settings)
    job.wait_until(lambda: (run.path / "metrics.jsonl").exists() and len(rows(run.path)) >= 3, "steps")
    assert {one.environ().get("SLURM_STEP_GPUS") for node in ("n1", "n2") for one in cluster.ranks_on(node)} == {"0"}
    assert {
        environment_of(one).get("CUDA_VISIBLE_DEVICES") for node in ("n1", "n2") for one in cluster.ranks_on(node)
    } == {"0"}
    job.signal_batch("USR1")
    job.wait_for("PENDING", restarts=1)
    stopped_after = run.saved
    assert 3 <= stopped_after < 24
    assert f"stopped after step {stopped_after} of 24 (SIGUSR1)" in job.output()
    assert f"job {job.number} is put back into the queue" in job.output()
    job.start_now()
    assert job.wait_for("COMPLETED", "FAILED")["JobState"] == "COMPLETED", job.output()
    assert "Traceback" not in job.output() and "exit barrier" not in job.output()
    without = Run(cluster, folder, "unstopped")
    assert set(run_ranks(2, without_curves, main, [*without.arguments, *settings], timeout_s=LIMIT_S)) == {0}
    assert_same_weights(run.path, without.path)
    drill.record(
        "2 nodes, 24 steps; SIGUSR1 to the batch script, as --signal=B:USR1@600 sends it",
        f"stopped after step {stopped_after}, put back, resumed, completed; the weights are bit for bit those of a run "
        "on two ranks of one host that was never stopped; no traceback; steps saw their GPUs (SLURM_STEP_GPUS=0, "
        "CUDA_VISIBLE_DEVICES=0 on both nodes) though only --exclusive had asked for them",
    )


def test_a_time_limit_that_is_too_short_is_told_and_not_repeated(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "short")
    job = run.submit(*ENDLESS, options=(*TWO_NODES, "--time=1"))
    facts = job.wait_for("FAILED", "TIMEOUT")
    assert facts["ExitCode"] == "75:0" and facts["Restarts"] == "0"
    last = job.output().splitlines()[-1]
    assert last.startswith(f"job {job.number} is not put back into the queue") and "--time" in last
    drill.record("--time 1 with the script's own USR1@600", f"exit 75, not put back; last line: {last!r}")


def test_sigusr1_while_the_settings_are_checked_has_a_word(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "checked")
    job = run.submit(*ENDLESS)
    job.wait_for("RUNNING")
    job.wait_until(lambda: is_checked(run), "the check")
    job.signal_batch("USR1")
    facts = job.wait_for("FAILED")
    assert facts["ExitCode"] == "75:0"
    first = job.output().splitlines()[0]
    assert first == "stopped by SIGUSR1 while the settings were being checked: nothing was started"
    drill.record("SIGUSR1 during the dry run", f"exit 75; {first!r}")


def is_checked(run: Run) -> bool:
    """True while the check of a run is under way."""
    return any(
        "--dry-run" in (words := one.info["cmdline"] or ()) and f"run.name={run.name}" in words
        for one in psutil.process_iter(["cmdline"])
    )


def test_preemption_saves_and_puts_the_job_back(cluster: Cluster, folder: Path, drill: Drill) -> None:
    for partition in ("gpu", "cancel"):
        run = Run(cluster, folder, f"preempted-{partition}")
        job = run.submit_and_wait(options=(*TWO_NODES, f"--partition={partition}"))
        urgent = cluster.call(
            "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=:"
        )
        job.wait_for("PENDING", restarts=1)
        saved = run.saved
        assert f"stopped after step {saved} of 100000 (SIGTERM)" in job.output() and "Traceback" not in job.output()
        Job(cluster, urgent, folder).wait_for("COMPLETED")
        run.goes_on(job, after=saved)
        mode = cluster.call("scontrol", "show", "partition", partition).split("PreemptMode=")[1].split()[0]
        drill.record(
            f"preemption by a partition of higher tier, PreemptMode={mode}, GraceTime=60 (SIGTERM to the steps alone)",
            f"saved step {saved}, put back, went on after it",
        )


def test_preemption_by_the_jobs_own_signal(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "preempted-signal")
    with cluster.set("SlurmctldParameters=preempt_send_user_signal"):
        job = run.submit_and_wait(options=(*TWO_NODES, "--time=60"))
        cluster.call("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=:")
        job.wait_for("PENDING", restarts=1)
    saved = run.saved
    assert f"stopped after step {saved} of 100000 (SIGUSR1)" in job.output()
    drill.record(
        "preemption with SlurmctldParameters=preempt_send_user_signal (SIGUSR1 to the batch script)",
        f"saved step {saved}, put back",
    )


def test_a_rank_that_is_killed_ends_the_job_by_name(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "killed")
    job = run.submit_and_wait()
    (second,) = [status for status in read_statuses(run.files) if status.rank == 1]
    os.kill(second.pid, signal.SIGKILL)
    facts = job.wait_for("FAILED")
    report = read_error(run.files)
    assert report is not None and report.kind == "lost" and report.rank == 1
    assert facts["ExitCode"] == "4:0" and facts["Restarts"] == "0"
    assert f"rank 1 ({second.host}, pid {second.pid}) ended without an error message" in job.output()
    assert "Traceback" not in job.output()
    drill.record("kill -9 of the rank of the second node", f"exit 4, not put back: {report.message!r}")


def test_a_node_whose_daemon_dies_gives_the_job_to_others(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "without-slurmd")
    job = run.submit_and_wait()
    cluster.kill_slurmd("n2")
    job.wait_for("PENDING", restarts=1)
    saved = run.saved
    cluster.start_node("n2")
    run.goes_on(job, after=saved)
    drill.record(
        f"the slurmd of the second node dies, its ranks do not; {NOTICED}",
        f"SLURM put the job back after SlurmdTimeout; saved step {saved}; went on after it",
    )


@pytest.mark.parametrize("node", ["n2", "n1"])
def test_a_node_that_dies_whole_is_survived(cluster: Cluster, folder: Path, drill: Drill, node: str) -> None:
    """n1 has the batch script. A signal of the job's first life may reach the step of its second one (`slurm.after`):
    then there is a third."""
    run = Run(cluster, folder, f"without-{node}")
    job = run.submit_and_wait()
    cluster.kill_node(node)
    job.wait_for("PENDING", restarts=1)
    saved = run.saved
    cluster.start_node(node)
    restarts = run.goes_on_at_last(job, after=saved)
    drill.record(
        f"all processes of {node} die at once: slurmd, slurmstepd, torchrun, the rank"
        f"{', srun and the batch script' if node == 'n1' else ''}; {NOTICED}",
        f"SLURM put the job back (NODE_FAIL); it went on after step {saved}, in its life number {restarts + 1}",
    )


def test_a_node_that_dies_whole_is_noticed_by_the_run_before_slurm(
    cluster: Cluster, folder: Path, drill: Drill
) -> None:
    run = Run(cluster, folder, "noticed")
    with cluster.set(f"SlurmdTimeout={USUAL_S}"):
        job = run.submit_and_wait()
        cluster.kill_node("n2")
        job.wait_until(lambda: "is put back" in job.output(), "put back by its own script")
        saved = run.saved
        assert f"\nSLURM gets no answer from n2: job {job.number} is put back into the queue\n" in job.output()
        cluster.start_node("n2")
        job.wait_for("PENDING", restarts=1)
        run.goes_on_at_last(job, after=saved)
    drill.record(
        f"all processes of n2 die at once; SlurmdTimeout={USUAL_S}, SLURM's default",
        f"'SLURM gets no answer from n2: job {job.number} is put back into the queue'; it went on after step {saved}",
    )


def test_a_node_that_dies_whole_is_told_where_slurm_may_not_requeue(
    cluster: Cluster, folder: Path, drill: Drill
) -> None:
    run = Run(cluster, folder, "told")
    job = run.submit_and_wait(options=(*TWO_NODES, "--no-requeue"))
    cluster.kill_node("n2")
    facts = job.wait_for("NODE_FAIL", "FAILED")
    assert facts["Restarts"] == "0" and "Traceback" not in job.output()
    report = read_error(run.files)
    assert report is not None and report.kind == "lost" and report.rank == 1 and report.message in job.output()
    drill.record(
        f"all processes of n2 die at once, of a job with --no-requeue; {NOTICED}",
        f"{facts['JobState']}: {report.message!r}",
    )


def test_a_bad_setting_is_told_once(cluster: Cluster, folder: Path, drill: Drill) -> None:
    job = Run(cluster, folder, "misspelt").submit("rollout.prompts_per_setp=8")
    facts = job.wait_for("FAILED")
    assert facts["ExitCode"] == "2:0" and facts["Restarts"] == "0"
    (line,) = job.output().splitlines()
    assert "did you mean rollout.prompts_per_step?" in line
    drill.record("a misspelt setting", f"exit 2, not put back: {line!r}")


def test_the_jobs_of_an_array_are_runs_of_their_own(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "seed-%a")
    settings = ("run.seed=%a", "run.num_steps=2")
    job = run.submit(*settings, options=("--nodes=1", "--array=1-2"))
    for index in (1, 2):
        assert job.wait_for("COMPLETED", "FAILED", index=index)["JobState"] == "COMPLETED", job.output(index)
    one, other = (rows(folder / "runs" / f"seed-{index}") for index in (1, 2))
    assert len(one) == len(other) == 2
    samples = [(folder / f"runs/seed-{index}/samples.jsonl").read_text() for index in (1, 2)]
    assert samples[0] != samples[1]
    refused = Run(cluster, folder, "same").submit(options=("--nodes=1", "--array=1-1"))
    assert refused.wait_for("FAILED", index=1)["ExitCode"] == "2:0"
    drill.record(
        "--array 1-2 with run.name=seed-%a run.seed=%a; and without",
        f"two runs with samples of their own; {refused.output(1).strip()!r}, exit 2",
    )


def test_nodes_without_a_gpu(cluster: Cluster, folder: Path, drill: Drill) -> None:
    options = ("--nodes=1", "--partition=plain")
    job = Run(cluster, folder, "no-gpu").submit(options=options)
    assert job.wait_for("FAILED")["ExitCode"] == "2:0"
    assert "SLURM has granted no GPU" in job.output()
    counted = Run(cluster, folder, "nproc").submit("run.num_steps=1", options=options, NPROC="2")
    assert counted.wait_for("COMPLETED", "FAILED")["JobState"] == "COMPLETED", counted.output()
    assert "on 2 ranks" in counted.output()
    drill.record("a node without a GPU; and with NPROC=2", f"exit 2: {job.output().strip()!r}; completed on 2 ranks")


def test_another_user_than_root(cluster: Cluster, folder: Path, drill: Drill, interpreter: Path) -> None:
    own = folder / "of-nobody"
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    (own / "python").symlink_to(interpreter)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    run = Run(cluster, folder, "of-nobody")
    job = cluster.submit(
        TWO_NODES,
        *run.arguments,
        "run.num_steps=2",
        f"run.dir={own}",
        user="nobody",
        PATH=f"{own}{os.pathsep}{os.environ['PATH']}",
        PYTHONPATH=f"{cluster.environment['PYTHONPATH']}{os.pathsep}{packages}",
        XDG_CACHE_HOME=str(own),
        HOME=str(own),
    )
    assert job.wait_for("COMPLETED", "FAILED")["JobState"] == "COMPLETED", job.output()
    assert len(rows(own / "of-nobody")) == 2
    assert (own / "of-nobody/metrics.jsonl").owner() == "nobody"
    drill.record("two nodes, as the user nobody", "completed; the run's files are the user's")


def test_the_time_limit_itself_and_scancel(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "limited")
    job = run.submit_and_wait(options=(*TWO_NODES, "--time=60", "--signal=B:USR1@60"))
    job.limit(minutes=2)  # from now on: a busy machine may need a minute to start
    job.wait_for("PENDING", restarts=1)
    first = run.saved
    assert first > 0 and f"stopped after step {first} of 100000 (SIGUSR1)" in job.output()
    job.start_now()
    job.wait_for("RUNNING", restarts=1)
    job.wait_until(lambda: run.saved > first, "more steps")
    job.cancel()
    facts = job.wait_for("CANCELLED")
    requeue = read_requeue(run.files)
    assert requeue is not None and requeue.reason == "SIGTERM" and requeue.step == run.saved
    assert int(facts["Restarts"]) == 1 and "Traceback" not in job.output()
    drill.record(
        "2 nodes, --signal=B:USR1@60 and a time limit of 2 minutes from its first steps on; scancel after the restart",
        f"saved step {first}, put back, went on; scancel: saved step {run.saved}, left `requeue`, was not put back; no "
        "traceback",
    )
