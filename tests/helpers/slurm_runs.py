"""Runs of the small model in jobs: one for a drill, and one that lives through many of them."""

from __future__ import annotations

from pathlib import Path

from spmdrl.checkpoint.manifest import newest_step
from spmdrl.faults.files import FaultFiles
from tests.helpers.slurm_cluster import Cluster, Job

TWO_NODES = ("--nodes=2",)
ENDLESS = ("run.num_steps=100000", "checkpoint.every=2", "eval.every=1000", "export.at_end=false")
STEPS = 4  # that an endless run has saved before something is done to it
LONG = (*TWO_NODES, "--time=60", "--signal=B:USR1@60")


class Run:
    """A run of the small model in a job, by its name."""

    def __init__(self, cluster: Cluster, folder: Path, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.arguments = [str(folder / "c.toml"), f"run.name={name}"]
        self.path = folder / "runs" / name
        self.files = FaultFiles(self.path)

    @property
    def saved(self) -> int:
        """The last step that it has saved."""
        return newest_step(self.path / "checkpoints")

    def submit(self, *settings: str, options: tuple[str, ...] = TWO_NODES, **variables: str) -> Job:
        """Submit a job that runs it with these settings."""
        return self.cluster.submit(options, *self.arguments, *settings, **variables)

    def submit_endless(self, *, options: tuple[str, ...] = TWO_NODES) -> Job:
        """Submit a job that runs it until something ends it, and wait for its first steps."""
        job = self.submit(*ENDLESS, options=options)
        job.wait_until(lambda: self.saved >= STEPS, "its first steps")
        return job


class LastingRun(Run):
    """An endless run whose job is put back again and again, so that what one drill resumes is what the next one stops.

    Once a drill has failed, the next one gets another job.
    """

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(cluster, folder, "lasting")
        self._job: Job | None = None

    @property
    def job(self) -> Job:
        """Its job."""
        assert self._job is not None, "`be_there` submits it"
        return self._job

    @property
    def restarts(self) -> int:
        """How often its job was put back into the queue."""
        return int(self.job.facts()["Restarts"])

    def be_there(self) -> None:
        """Make sure that its job runs, on nodes that are all there."""
        if self._job is None or self.job.facts()["JobState"] != "RUNNING" or self.cluster.silent():
            self.cluster.settle()
            before = self.saved
            self._job = self.submit(*ENDLESS, options=LONG)
            self._job.wait_until(lambda: self.saved >= before + STEPS, "its first steps")

    def is_put_back(self, *, restarts: int) -> int:
        """Wait until its job has been put back for this time; returns the step that it has saved."""
        self.job.wait_for("PENDING", restarts=restarts)
        return self.saved

    def goes_on(self, *, after: int) -> None:
        """Wait for a step after this one. The job may be put back once more before."""
        started = set()

        def further() -> bool:
            facts = self.job.facts()
            if facts["Reason"] == "BeginTime" and facts["Restarts"] not in started:
                self.job.start_soon()
                started.add(facts["Restarts"])
            return self.saved > after

        self.job.wait_until(further, f"a step after {after}")
