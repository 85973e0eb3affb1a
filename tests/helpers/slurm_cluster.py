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
LIMIT_S = 300.0  # for anything that a busy machine does within a minute


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
    def signalling_as_the_job_asked(self) -> Iterator[None]:
        """Let preemption send the job's own signal, as sites do with preempt_send_user_signal."""
        file = self.folder / "slurm.conf"
        before = file.read_text()
        file.write_text(before + "SlurmctldParameters=preempt_send_user_signal\n")
        self.call("scontrol", "reconfigure")
        try:
            yield
        finally:
            file.write_text(before)
            self.call("scontrol", "reconfigure")

    def ranks_on(self, node: str) -> list[psutil.Process]:
        """The processes of jobs' steps on a node, torchrun and the ranks among them, but not batch scripts."""
        return [
            one for one in psutil.process_iter() if environment_of(one).get("SLURMD_NODENAME") == node and in_step(one)
        ]

    def kill_slurmd(self, node: str) -> None:
        """Kill the daemon of a node; its steps go on."""
        psutil.Process(int((self.folder / "daemons" / node).read_text())).kill()

    def kill_node(self, node: str) -> None:
        """Kill all that runs on a node at once, as a power cut does."""
        steps = self.ranks_on(node)
        daemons = {one.parent() for one in steps}
        self.kill_slurmd(node)
        for one in [*(daemon for daemon in daemons if daemon and daemon.name().startswith("slurmstepd")), *steps]:
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node again."""
        subprocess.run([SCRIPT, "node", self.folder, node], check=True, timeout=60)


def environment_of(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def in_step(process: psutil.Process) -> bool:
    """True for a process that srun has started, and not sbatch."""
    return "SLURM_STEP_NODELIST" in environment_of(process)


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

    def wait_until(self, holds: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline, (what, self.facts(), self.output())
            time.sleep(0.3)

    def wait_for(self, *states: str, restarts: int | None = None, index: int | None = None) -> Mapping[str, str]:
        """Until it is in one of these states, after this many restarts."""

        def there() -> bool:
            facts = self.facts(index)
            return facts["JobState"] in states and restarts in (None, int(facts["Restarts"]))

        self.wait_until(there, f"{states}, {restarts} restarts")
        return self.facts(index)

    def start_now(self) -> None:
        """SLURM lets a job that was put back wait for two minutes; this one does not."""
        self.wait_until(lambda: self.facts()["Reason"] == "BeginTime", "waits to begin")
        self.cluster.call("scontrol", "update", f"jobid={self.number}", "StartTime=now")

    def signal_batch(self, name: str) -> None:
        """Send the batch script alone a signal, as `--signal=B:` does."""
        self.cluster.call("scancel", "--batch", f"--signal={name}", self.number)

    def cancel(self) -> None:
        self.cluster.call("scancel", self.number)


def write_report(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
