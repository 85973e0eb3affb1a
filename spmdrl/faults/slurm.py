"""Run on the nodes of a SLURM job: `python -m spmdrl.faults.slurm CONFIG [section.key=value ...]`, from slurm.sbatch.

srun starts one torchrun on each node. When the run has stopped before its end, the job is put back into the queue if
that brings it further. Needs only the standard library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spmdrl.faults.supervise import Commands, Ending, Requests, gpus_of_driver, launch, tell
from spmdrl.faults.text import say
from spmdrl.faults.verdict import EXIT_HANG, EXIT_LOST_RANK, EXIT_USER_ERROR

# Below the ports that the kernel gives to connections; jobs on the same node need different ones.
FIRST_PORT, NUM_PORTS = 20000, 12000
MOST_RESTARTS = 20  # of a job whose ranks are asked to stop, by whatever that may be, before they have saved a step
ARRAY_INDEX = "%a"  # is replaced by the index of an array job in arguments, as in sbatch's --output


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """This job, as SLURM's variables describe it."""

    number: int
    nodes: str  # as SLURM abbreviates their names
    num_nodes: int
    first_node: str
    cores_per_node: str
    gpus_per_node: int  # granted by SLURM
    ranks_per_node: int
    array_index: str | None
    restarts: int  # how often it was put back into the queue

    @property
    def num_ranks(self) -> int:
        """The ranks of the run."""
        return self.num_nodes * self.ranks_per_node

    @property
    def command(self) -> list[str]:
        """The command that starts the ranks, up to the module that they run."""
        # A step gets the GPUs that a job has asked for, but not those that it has because it is --exclusive. And it
        # gives a task a single core by default.
        gpus = [f"--gres=gpu:{self.gpus_per_node}"] if self.gpus_per_node else []
        step = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={self.cores_per_node}", "--cpu-bind=none", *gpus]
        # $SLURM_NODEID differs between nodes, so the shell that srun starts on each node must expand it.
        on_each_node = [
            "bash",
            "-c",
            f'exec {sys.executable} -m spmdrl.faults.torchrun --node-rank "$SLURM_NODEID" "$@"',
        ]
        address = ["--master-addr", self.first_node, "--master-port", str(FIRST_PORT + self.number % NUM_PORTS)]
        size = ["--nnodes", str(self.num_nodes), "--nproc-per-node", str(self.ranks_per_node)]
        return [*step, *on_each_node, "torchrun", *size, *address]

    def arguments(self, given: Sequence[str]) -> list[str]:
        """Put the index of an array job into the arguments. Raises ValueError if they would be the same for all."""
        if self.array_index is None:
            return list(given)
        if not any(one.startswith("run.name=") and ARRAY_INDEX in one for one in given):
            raise ValueError(
                f"the jobs of an array would all write the same run: add run.name=NAME-{ARRAY_INDEX} and, for seeds, "
                f"run.seed={ARRAY_INDEX} ({ARRAY_INDEX} becomes the job's index)"
            )
        return [one.replace(ARRAY_INDEX, self.array_index) for one in given]


def job_of(environment: Mapping[str, str]) -> SlurmJob:
    """Read SLURM's variables. Raises ValueError where they are missing, or grant nothing to compute on."""
    if "SLURM_JOB_ID" not in environment:
        raise ValueError("this is no job of SLURM: submit it with sbatch --nodes N launch/slurm.sbatch CONFIG")
    granted = int(environment.get("SLURM_GPUS_ON_NODE", "0"))
    ranks = int(environment.get("NPROC", "0")) or granted or gpus_of_driver()
    if not ranks:
        raise ValueError(
            "SLURM has granted no GPU, and nvidia-smi finds none on the first node: ask for GPUs (sbatch "
            "--gres=gpu:8), or set NPROC, the number of ranks on each node, to train on the CPU"
        )
    nodes = environment["SLURM_JOB_NODELIST"]
    hosts = subprocess.run(["scontrol", "show", "hostnames", nodes], check=True, capture_output=True, text=True).stdout
    return SlurmJob(
        number=int(environment["SLURM_JOB_ID"]),
        nodes=nodes,
        num_nodes=int(environment["SLURM_NNODES"]),
        first_node=hosts.split()[0],
        cores_per_node=environment["SLURM_CPUS_ON_NODE"],
        gpus_per_node=granted,
        ranks_per_node=ranks,
        array_index=environment.get("SLURM_ARRAY_TASK_ID"),
        restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
    )


def after(job: SlurmJob, ending: Ending) -> str:
    """Put a job back into the queue where that brings it further; returns a sentence about it.

    A request that came to the ranks alone is no word about the job: it was preempted, or a signal of its last life
    has come late, for SLURM delivers to a node that was down when it is back. After such a signal the node is no
    longer the job's own, so its ranks cannot start there again; the job has to begin once more.
    """
    if ending.requested and ending.reason != "SIGUSR1":
        return ""  # by scancel, preemption or the end of a node: SLURM decides what becomes of the job
    if ending.stopped:
        return may_loop(job, ending) or put_back(job)
    if ending.code in (EXIT_LOST_RANK, EXIT_HANG) and (silent := silent_nodes(job)):
        return f"SLURM gets no answer from {', '.join(silent)}: {put_back(job)}"
    return ""


def may_loop(job: SlurmJob, ending: Ending) -> str:
    """Return why a job that has stopped would do so for ever; empty where it would not."""
    if ending.advanced or (not ending.requested and job.restarts < MOST_RESTARTS):
        return ""
    by_limit = "raise its time limit (sbatch --time), or let it stop later (--signal=B:USR1@SECONDS before it)"
    by_others = f"it has been put back {job.restarts} times, and what ended its ranks is above"
    return (
        f"job {job.number} is not put back into the queue, because it has saved no step and would do the same again: "
        f"{by_limit if ending.requested else by_others}"
    )


def put_back(job: SlurmJob) -> str:
    """Put the job back into the queue; returns a sentence that says whether that was possible."""
    done = subprocess.run(["scontrol", "requeue", str(job.number)], check=False, capture_output=True, text=True)
    if done.returncode:
        return f"job {job.number} could not be put back into the queue: {done.stderr.strip()}"
    return f"job {job.number} is put back into the queue"


def silent_nodes(job: SlurmJob) -> list[str]:
    """Return the names of the job's nodes that do not answer SLURM.

    SLURM ends a job for such a node only after its SlurmdTimeout, which may be later than the ranks have given up.
    """
    command = ["sinfo", "--noheader", "--dead", "--Node", f"--nodes={job.nodes}", "--format=%N"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return sorted(set(done.stdout.split()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    given = sys.argv[1:] if argv is None else argv
    with Requests() as requests:
        try:
            job = job_of(os.environ)
            starter = Commands(
                module=os.environ.get("MODULE", "spmdrl.train"),
                arguments=job.arguments(given),
                num_ranks=job.num_ranks,
                command=job.command,
            )
        except ValueError as error:
            say(f"cannot start: {error}", sys.stderr)
            return EXIT_USER_ERROR
        ending = launch(starter, requests)
        tell(ending)
        if sentence := after(job, ending):
            say(sentence, sys.stderr)
        return ending.code


if __name__ == "__main__":
    sys.exit(main())
