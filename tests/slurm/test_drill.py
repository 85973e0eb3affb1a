"""launch/slurm.sbatch, unmodified, on a cluster of SLURM itself: what it promises, and what goes wrong on clusters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from spmdrl.faults.rank_status import read_statuses
from spmdrl.faults.verdict import read_error, read_requeue
from spmdrl.train import main
from tests.helpers.ranks import run_ranks
from tests.helpers.slurm_cluster import LIMIT_S, Cluster, environment_of
from tests.helpers.slurm_drill import Drill
from tests.helpers.slurm_runs import ENDLESS, TWO_NODES, LastingRun, Run
from tests.helpers.small_run import assert_same_weights, rows, without_curves

# "signal": what ends a drill that hangs must not end the cluster's fixtures with it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S, method="signal")]
NOTICED = "SlurmdTimeout=20"  # of launch/slurm_cluster.sh
USUAL_S = 300  # SLURM's own, later than ranks that have lost one wait for each other


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
    job.start_soon()
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
    # SLURM sends the signal up to a minute late, and no step may be done by then.
    (folder / "slow.py").write_text("import time\n\ndef slow(**_):\n    time.sleep(100)\n    return 0.0\n")
    slow = f'reward.terms=[{{ kind = "function", function = "{folder}/slow.py:slow" }}]'
    job = run.submit(*ENDLESS, slow, "reward.timeout_s=200", options=(*TWO_NODES, "--time=1"))
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


def test_a_job_that_is_preempted_saves_and_is_put_back(
    cluster: Cluster, folder: Path, drill: Drill, lasting: LastingRun
) -> None:
    restarts = lasting.restarts
    cluster.preempt()
    saved = lasting.is_put_back(restarts=restarts + 1)
    said = lasting.job.output()
    assert f"stopped after step {saved} of 100000 (SIGTERM)" in said and "Traceback" not in said
    lasting.goes_on(after=saved)
    drill.record(
        "preemption by a partition of higher tier, PreemptMode=REQUEUE, GraceTime=60 (SIGTERM to the steps alone)",
        f"saved step {saved}, put back, went on after it",
    )


def test_preemption_by_the_jobs_own_signal(cluster: Cluster, drill: Drill, lasting: LastingRun) -> None:
    restarts = lasting.restarts
    with cluster.set("SlurmctldParameters=preempt_send_user_signal"):
        cluster.preempt()
        saved = lasting.is_put_back(restarts=restarts + 1)
    assert f"stopped after step {saved} of 100000 (SIGUSR1)" in lasting.job.output()
    lasting.goes_on(after=saved)
    drill.record(
        "preemption with SlurmctldParameters=preempt_send_user_signal (SIGUSR1 to the batch script)",
        f"saved step {saved}, put back, went on after it",
    )


def test_the_time_limit_itself(drill: Drill, lasting: LastingRun) -> None:
    restarts = lasting.restarts
    lasting.job.limit(minutes=2)  # from now on: a busy machine may need a minute to start
    saved = lasting.is_put_back(restarts=restarts + 1)
    assert f"stopped after step {saved} of 100000 (SIGUSR1)" in lasting.job.output()
    lasting.job.limit(minutes=60)
    lasting.goes_on(after=saved)
    drill.record(
        "--signal=B:USR1@60 and a time limit of 2 minutes from its first steps on",
        f"saved step {saved}, put back, went on after it",
    )


def test_a_node_whose_daemon_dies_gives_the_job_to_others(cluster: Cluster, drill: Drill, lasting: LastingRun) -> None:
    restarts = lasting.restarts
    cluster.kill_slurmd("n2")
    saved = lasting.is_put_back(restarts=restarts + 1)
    cluster.start_node("n2")
    lasting.goes_on(after=saved)
    drill.record(
        f"the slurmd of n2 dies, its ranks do not; {NOTICED}",
        f"SLURM put the job back after SlurmdTimeout; saved step {saved}; went on after it",
    )


def test_a_node_that_dies_whole_is_noticed_by_the_run_before_slurm(
    cluster: Cluster, drill: Drill, lasting: LastingRun
) -> None:
    restarts = lasting.restarts
    sentence = f"SLURM gets no answer from n2: job {lasting.job.number} is put back into the queue"
    with cluster.set(f"SlurmdTimeout={USUAL_S}"):
        cluster.kill_node("n2")
        lasting.job.wait_until(lambda: f"\n{sentence}\n" in lasting.job.output(), "put back by its own script")
        cluster.start_node("n2")
        saved = lasting.is_put_back(restarts=restarts + 1)
    lasting.goes_on(after=saved)
    drill.record(
        f"all processes of n2 die at once; SlurmdTimeout={USUAL_S}, SLURM's default",
        f"{sentence!r}; it went on after step {saved}, put back {lasting.restarts - restarts} time(s) in all",
    )


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_node_that_dies_whole_is_survived(cluster: Cluster, drill: Drill, lasting: LastingRun, node: str) -> None:
    """n1 has the batch script. A signal of the job's first life may reach the step of its second one (`slurm.after`):
    then there is a third."""
    restarts = lasting.restarts
    cluster.kill_node(node)
    saved = lasting.is_put_back(restarts=restarts + 1)
    cluster.start_node(node)
    lasting.goes_on(after=saved)
    again = lasting.restarts - restarts
    drill.record(
        f"all processes of {node} die at once: slurmd, slurmstepd, torchrun, the rank"
        f"{', srun and the batch script' if node == 'n1' else ''}; {NOTICED}",
        f"SLURM put the job back (NODE_FAIL); it went on after step {saved}, put back {again} time(s) in all",
    )


def test_scancel_saves_and_puts_nothing_back(drill: Drill, lasting: LastingRun) -> None:
    restarts = lasting.restarts
    lasting.job.cancel()
    facts = lasting.job.wait_for("CANCELLED")
    requeue = read_requeue(lasting.files)
    assert requeue is not None and requeue.reason == "SIGTERM" and requeue.step == lasting.saved
    assert int(facts["Restarts"]) == restarts
    drill.record("scancel", f"saved step {lasting.saved}, left `requeue`, was not put back")


def test_preemption_in_a_partition_that_would_cancel(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "preempted")
    job = run.submit_endless(options=(*TWO_NODES, "--partition=cancel"))
    cluster.preempt()
    job.wait_for("PENDING", restarts=1)
    assert f"stopped after step {run.saved} of 100000 (SIGTERM)" in job.output() and "Traceback" not in job.output()
    drill.record("preemption in a partition with PreemptMode=CANCEL, GraceTime=60", f"saved step {run.saved}, put back")


def test_a_rank_that_is_killed_ends_the_job_by_name(cluster: Cluster, folder: Path, drill: Drill) -> None:
    run = Run(cluster, folder, "killed")
    job = run.submit_endless()
    (second,) = [status for status in read_statuses(run.files) if status.rank == 1]
    os.kill(second.pid, signal.SIGKILL)
    facts = job.wait_for("FAILED")
    report = read_error(run.files)
    assert report is not None and report.kind == "lost" and report.rank == 1
    assert facts["ExitCode"] == "4:0" and facts["Restarts"] == "0"
    assert f"rank 1 ({second.host}, pid {second.pid}) ended without an error message" in job.output()
    assert "Traceback" not in job.output()
    drill.record("kill -9 of the rank of the second node", f"exit 4, not put back: {report.message!r}")


def test_a_node_that_dies_whole_is_told_where_slurm_may_not_requeue(
    cluster: Cluster, folder: Path, drill: Drill
) -> None:
    run = Run(cluster, folder, "told")
    job = run.submit_endless(options=(*TWO_NODES, "--no-requeue"))
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
    for index in (1, 2):
        assert [row["step"] for row in rows(folder / "runs" / f"seed-{index}")] == [0, 1, 2]
    samples = [(folder / f"runs/seed-{index}/samples.jsonl").read_text() for index in (1, 2)]
    assert samples[0] != samples[1]
    refused = Run(cluster, folder, "same").submit(options=("--nodes=1", "--array=1-1"))
    assert refused.wait_for("FAILED", index=1)["ExitCode"] == "2:0"
    drill.record(
        "--array 1-2 with run.name=seed-%a run.seed=%a; and without",
        f"two runs with samples of their own; {refused.output(1).strip()!r}, exit 2",
    )


def test_a_second_job_of_a_run_that_goes_on_is_refused(
    cluster: Cluster, folder: Path, drill: Drill, lasting: LastingRun
) -> None:
    """Also when the first has been put back before, and beside a launch without SLURM."""
    saved = lasting.saved
    second = Run(cluster, folder, "lasting").submit(*ENDLESS, options=("--nodes=1", "--partition=plain"), NPROC="2")
    assert second.wait_for("FAILED")["ExitCode"] == "2:0"
    (line,) = second.output().splitlines()
    assert f"the run folder {lasting.path} is in use by process " in line
    by_hand = [sys.executable, "-m", "spmdrl.tools.local", "spmdrl.train", *lasting.arguments, *ENDLESS]
    beside = subprocess.run(by_hand, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert beside.returncode == 2 and "is in use by process " in beside.stderr
    lasting.job.wait_until(lambda: lasting.saved > saved, "a step of the first")
    drill.record("a second job of the same run, and a launch by hand, while the first goes on", f"exit 2: {line!r}")


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
    for above in folder.parents[:3]:
        above.chmod(0o755)  # pytest takes this away whenever it starts, also beside these tests
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
        TORCHINDUCTOR_CACHE_DIR=str(own / "torch"),  # not that of the tests' own user, which sbatch passes on
        HOME=str(own),
    )
    assert job.wait_for("COMPLETED", "FAILED")["JobState"] == "COMPLETED", job.output()
    assert [row["step"] for row in rows(own / "of-nobody")] == [0, 1, 2]
    assert (own / "of-nobody/metrics.jsonl").owner() == "nobody"
    drill.record("two nodes, as the user nobody", "completed; the run's files are the user's")
