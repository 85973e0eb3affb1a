"""The SLURM cluster of launch/slurm_cluster.sh, as tests use it: submit, wait, break nodes, read a job's output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "slurm_cluster.sh"
JOB = ROOT / "launch" / "slurm.sbatch"
LIMIT_S = 240.0  # for anything that a quiet machine does within a minute
NODES = ("n1", "n2", "n3")


class Missing(Exception):
    """The cluster cannot be started here; says why."""


class Cluster:
    """One cluster in one folder, from `start` to `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.parent.chmod(0o755)  # jobs of other users read it

    def start(self) -> None:
        """Raises Missing where SLURM is not installed."""
        done = subprocess.run([SCRIPT, "start", self.folder], capture_output=True, text=True, timeout=120)
        if done.returncode == 2:
            raise Missing(done.stderr.strip())
        assert done.returncode == 0, done.stderr

    def stop(self) -> None:
        subprocess.run([SCRIPT, "stop", self.folder], check=True, timeout=120)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of commands, and so of jobs."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CUDA_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return outside | {"SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path, "PYTHONPATH": str(ROOT)}

    def call(self, *command: str) -> str:
        """Run a command of SLURM's; returns what it prints."""
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout.strip()

    def submit(self, options: Sequence[str], *arguments: str, user: str | None = None, **variables: str) -> Job:
        """Submit launch/slurm.sbatch as it is, with sbatch's options and the program's arguments."""
        output = self.folder / "output" / f"{time.monotonic_ns()}-%a.txt"
        output.parent.mkdir(exist_ok=True)
        output.parent.chmod(0o777)
        command = ["sbatch", "--parsable", f"--output={output}", *options, str(JOB), *arguments]
        if user is not None:
            command = ["runuser", "-u", user, "--", *command]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment | variables, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), output)

    @contextmanager
    def set(self, *lines: str) -> Iterator[None]:
        """Put lines into slurm.conf, in place of those with the same name, while the block lasts."""
        file = self.folder / "slurm.conf"
        before = file.read_text()
        names = tuple(line.split("=")[0] + "=" for line in lines)
        others = [line for line in before.splitlines() if not line.startswith(names)]
        file.write_text("\n".join([*others, *lines, ""]))
        self.call("scontrol", "reconfigure")
        try:
            yield
        finally:
            file.write_text(before)
            self.call("scontrol", "reconfigure")

    def processes_on(self, node: str) -> list[psutil.Process]:
        """The processes of jobs on a node: batch scripts, srun, torchrun and the ranks."""
        here = {"SLURMD_NODENAME": node, "SLURM_CONF": f"{self.folder}/slurm.conf"}
        return [one for one in psutil.process_iter(["cmdline"]) if here.items() <= environment_of(one).items()]

    def ranks_on(self, node: str) -> list[psutil.Process]:
        """Those that srun has started, and not sbatch: torchrun and the ranks."""
        return [one for one in self.processes_on(node) if "SLURM_STEP_NODELIST" in environment_of(one)]

    def kill_slurmd(self, node: str) -> None:
        """Kill the daemon of a node; its steps go on."""
        self._slurmd(node).kill()

    def kill_node(self, node: str) -> None:
        """Kill all that runs on a node at once, as a power cut does."""
        of_jobs = self.processes_on(node)
        parents = {one.parent() for one in of_jobs}
        daemons = [one for one in parents if one is not None and one.name().startswith("slurmstepd")]
        for one in [self._slurmd(node), *daemons, *of_jobs]:
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node again."""
        subprocess.run([SCRIPT, "node", self.folder, node], check=True, timeout=60)

    def preempt(self) -> None:
        """Submit a short job that takes n1 and n2 from jobs of the other partitions."""
        self.call("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=:")

    def silent(self) -> list[str]:
        """The nodes that do not answer."""
        return self.call("sinfo", "--noheader", "--dead", "--Node", "--format=%N").split()

    def settle(self) -> None:
        """End what a drill has left: cancel all jobs, start dead nodes again, and wait until every node is idle."""
        if numbers := self.call("squeue", "--noheader", "--format=%A").split():
            self.call("scancel", *numbers)
        for node in NODES:
            if not psutil.pid_exists(self._pid(node)) or self._slurmd(node).status() == psutil.STATUS_ZOMBIE:
                self.start_node(node)
        wait(self.is_idle, "the cluster did not come to rest", self.told)

    def is_idle(self) -> bool:
        """True when no job is in the queue and every node waits for one."""
        states = set(self.call("sinfo", "--noheader", "--Node", "--format=%T").split())
        return states == {"idle"} and not self.call("squeue", "--noheader")

    def told(self) -> str:
        """The cluster's own account, for somebody who asks why a drill has failed."""
        log = (self.folder / "logs" / "slurmctld").read_text().splitlines()[-15:]
        running = [f"{node}: {one.info['cmdline']}" for node in NODES for one in self.processes_on(node)]
        return "\n".join([self.call("sinfo", "--long", "--Node"), self.call("squeue", "--long"), *running, *log])

    def _slurmd(self, node: str) -> psutil.Process:
        return psutil.Process(self._pid(node))

    def _pid(self, node: str) -> int:
        return int((self.folder / "daemons" / node).read_text())


def wait(holds: Callable[[], Any], what: str, told: Callable[[], str]) -> None:
    """Until something holds. Fails after `LIMIT_S` with what did not happen, and what is told of it."""
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} within {LIMIT_S:.0f} s\n{told()}")
        time.sleep(0.3)


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


class Job:
    """A job that was submitted."""

    def __init__(self, cluster: Cluster, number: str, output: Path) -> None:
        self.cluster, self.number, self._output = cluster, number, output

    def output(self, index: int = 4294967294) -> str:
        """Return the text that it has printed; of an array, that of the job with this index."""
        path = Path(str(self._output).replace("%a", str(index)))
        return path.read_text() if path.exists() else ""

    def facts(self, index: int | None = None) -> Mapping[str, str]:
        """Return the fields of `scontrol show job`."""
        number = self.number if index is None else f"{self.number}_{index}"
        words = self.cluster.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def told(self) -> str:
        """All that is known of the job, for somebody who asks why a drill has failed."""
        facts = self.facts()
        named = " ".join(f"{name}={facts.get(name)}" for name in ("JobState", "Reason", "Restarts", "ExitCode"))
        return f"{named}\nits output:\n{self.output()}\nthe cluster:\n{self.cluster.told()}"

    def wait_until(self, holds: Callable[[], Any], what: str) -> None:
        """Until something holds of the job, which must not have ended before."""
        over = ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED")

        def there() -> bool:
            if holds():
                return True
            assert self.facts()["JobState"] not in over, f"job {self.number} ended before: {what}\n{self.told()}"
            return False

        wait(there, f"job {self.number} did not come to this: {what}", self.told)

    def wait_for(self, *states: str, restarts: int | None = None, index: int | None = None) -> Mapping[str, str]:
        """Until it is in one of these states, after this many restarts."""

        def there() -> bool:
            facts = self.facts(index)
            return facts["JobState"] in states and restarts in (None, int(facts["Restarts"]))

        after = "" if restarts is None else f" after {restarts} restarts"
        wait(there, f"job {self.number} was not {' or '.join(states)}{after}", self.told)
        return self.facts(index)

    def limit(self, *, minutes: int) -> None:
        """Let SLURM's time limit end it after this many more minutes."""
        hours, minutes_so_far, _ = map(int, self.facts()["RunTime"].split(":"))
        self.cluster.call(
            "scontrol", "update", f"jobid={self.number}", f"TimeLimit={hours * 60 + minutes_so_far + minutes}"
        )

    def start_soon(self) -> None:
        """SLURM lets a job that was put back wait for two minutes; this one waits for three seconds.

        Nodes refuse a job that starts within a second after its last life ("Job credential revoked").
        """
        self.wait_until(lambda: self.facts()["Reason"] == "BeginTime", "wait to begin")
        self.cluster.call("scontrol", "update", f"jobid={self.number}", "StartTime=now+3")

    def signal_batch(self, name: str) -> None:
        """Send the batch script alone a signal, as `--signal=B:` does."""
        self.cluster.call("scancel", "--batch", f"--signal={name}", self.number)

    def cancel(self) -> None:
        self.cluster.call("scancel", self.number)


def write_report(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
