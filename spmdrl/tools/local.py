"""Run on this machine: `python -m spmdrl.tools.local spmdrl.train CONFIG.toml [section.key=value ...] [--nproc N]`.

The settings are checked once, and then one process for each GPU starts, or two where there is none. Without a GPU what
every process would import is imported once: the check and the ranks are forked from this process, which computes
nothing itself. On GPUs torchrun starts the ranks, because no device has been used by forked ones yet.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.supervise import Started, finish, supervise
from spmdrl.faults.verdict import EXIT_INTERRUPTED, EXIT_USER_ERROR, SUPERVISED

MODULES = ("spmdrl.train", "spmdrl.sft")
RANKS_WITHOUT_GPU = 2
Program = Callable[[Sequence[str]], int]  # the `main` of a module

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_FORK = multiprocessing.get_context("fork")

# Loggers of torch's that report with a traceback what the supervisor tells in a sentence.
_THEY_SPEAK_TOO = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
# torchrun's default of 30 seconds is too short for a step and a checkpoint.
_SHUTDOWN_S = "600"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code: see `docs/faults.md`."""
    arguments = _parse(argv)
    if importlib.util.find_spec("torch") is None:
        print(f"{sys.executable} has no torch: run 'make setup', then 'source .venv/bin/activate'", file=sys.stderr)
        return EXIT_USER_ERROR
    num_gpus = count_gpus()
    num_ranks = arguments.nproc or num_gpus or RANKS_WITHOUT_GPU
    given = [arguments.config, *arguments.override]
    dry_run = [*given, "--dry-run", "--ranks", str(num_ranks)]
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_S)
    if num_gpus == 0:  # before torch is imported, which reads the first one then
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        program = program_of(arguments.module)
        if arguments.dry_run:
            return int(program(dry_run))
        code, folder = checked(program, dry_run)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if code:
        return code
    start = partial(torchrun, arguments.module) if num_gpus else partial(ForkedRanks, program)
    files = FaultFiles(Path(folder))
    return finish(files, supervise(files, lambda: start(num_ranks, given)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m spmdrl.tools.local",
        description="Check the settings, and run on this machine: one process for each GPU, two without a GPU.",
        epilog="settings are documented in docs/configuration.md, exit codes in docs/faults.md",
    )
    parser.add_argument("module", choices=MODULES)
    parser.add_argument("config", help="TOML file")
    parser.add_argument("override", nargs="*", help="section.key=value, read as TOML")
    parser.add_argument("--nproc", type=int, help="another number of processes")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and stop")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.nproc is not None and arguments.nproc < 1:
        parser.error(f"--nproc {arguments.nproc}: a run has at least 1 process")
    return arguments


def program_of(module: str) -> Program:
    """Import a program of ranks, which takes seconds, and return its `main`."""
    program: Program = importlib.import_module(module).main
    return program


def count_gpus() -> int:
    """Return the number of GPUs that processes of this machine may use; needs no torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return 0 if visible.startswith("-1") or not visible else len(visible.split(","))
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


def checked(program: Program, dry_run: Sequence[str]) -> tuple[int, str]:
    """Check the settings in a process of their own, once and before any rank starts.

    Returns the exit code of the check and the run's folder, which is "" unless the code is 0.
    """
    reader, writer = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_check, args=(program, dry_run, writer))
    process.start()
    writer.close()
    try:
        folder = reader.recv()
    except EOFError:
        folder = ""
    process.join()
    code = process.exitcode or 0
    return (code if code >= 0 else 128 - code), folder


def _check(program: Program, dry_run: Sequence[str], writer: Connection) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = program(dry_run)
    if code == 0:
        writer.send(folder_in(printed.getvalue()))
    sys.exit(code)


def folder_in(printed: str) -> str:
    """Return the folder of the run that a dry run has printed."""
    return printed.partition("# run folder\n")[2].partition("\n")[0]


def torchrun(module: str, num_ranks: int, given: Sequence[str]) -> Started:
    """Start the ranks by torchrun."""
    # Without --local-addr, rendezvous would use this machine's host name, which may not resolve.
    options = ["--standalone", "--local-addr", "127.0.0.1", "--signals-to-handle", SIGNALS]
    command = ["torch.distributed.run", *options, "--nproc-per-node", str(num_ranks), "-m", module, *given]
    return subprocess.Popen([sys.executable, "-m", *command], env=os.environ | {SUPERVISED: "1"})


class ForkedRanks:
    """Ranks that are forked from this process, under torchrun's agent, which is forked from it too."""

    def __init__(self, program: Program, num_ranks: int, given: Sequence[str]) -> None:
        self._agent = _FORK.Process(target=_run_agent, args=(program, num_ranks, given))
        self._agent.start()

    def wait(self) -> int:
        """Wait for the ranks to end; returns the agent's exit code, negative if a signal has ended it."""
        self._agent.join()
        assert self._agent.exitcode is not None, "join has a time limit"
        return self._agent.exitcode

    def terminate(self) -> None:
        """Send SIGTERM to the agent, which passes it on."""
        self._agent.terminate()


def _run_agent(program: Program, num_ranks: int, given: Sequence[str]) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in _THEY_SPEAK_TOO:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[SUPERVISED] = "1"
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the supervisor's are not for this process
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",  # the host's name may not resolve
        max_restarts=0,
        start_method="fork",
        signals_to_handle=SIGNALS,
    )
    try:
        elastic_launch(config, _run_rank)(program, given)
    except ChildFailedError as error:
        rank, first = min(error.failures.items(), key=lambda failed: failed[1].timestamp)
        if first.exitcode < 0:  # it could say nothing itself
            print(f"rank {rank} was ended by {first.signal_name()}", file=sys.stderr)
        sys.exit(1)
    except SignalException as error:
        sys.exit(128 + error.sigval)


def _run_rank(program: Program, given: Sequence[str]) -> None:
    sys.exit(program(given))


if __name__ == "__main__":
    sys.exit(main())
