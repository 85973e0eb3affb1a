"""Run on this machine: `python -m spmdrl.tools.local spmdrl.train CONFIG.toml [section.key=value ...] [--nproc N]`.

The settings are checked once, and then one process for each GPU starts, or two where there is none. Without a GPU what
every process would import is imported once (`faults/forked.py`); on GPUs torchrun starts the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence

from spmdrl.faults.forked import Forked
from spmdrl.faults.supervise import Commands, Requests, Starter, count_gpus, dry_run, launch, tell
from spmdrl.faults.text import Parser, say
from spmdrl.faults.verdict import EXIT_INTERRUPTED, EXIT_USER_ERROR

MODULES = ("spmdrl.train", "spmdrl.sft", "spmdrl.pairs")
RANKS_WITHOUT_GPU = 2
# Without --local-addr, rendezvous would use this machine's host name, which may not resolve.
STANDALONE = ("-m", "spmdrl.faults.torchrun", "--standalone", "--local-addr", "127.0.0.1")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code: see `docs/faults.md`."""
    with Requests() as requests:
        arguments = _parse(argv)
        if importlib.util.find_spec("torch") is None:
            say(f"{sys.executable} has no torch: run 'make setup', then 'source .venv/bin/activate'", sys.stderr)
            return EXIT_USER_ERROR
        num_gpus = count_gpus()
        num_ranks = arguments.nproc or num_gpus or RANKS_WITHOUT_GPU
        if num_gpus == 0:  # before torch is imported, which reads the first one then
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        given = [arguments.config, *arguments.override]
        if not arguments.dry_run:
            with starter_of(arguments.module, given, num_ranks=num_ranks, num_gpus=num_gpus) as starter:
                return tell(launch(starter, requests))
    try:
        return program_of(arguments.module)(dry_run(given, num_ranks))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def starter_of(
    module: str, given: Sequence[str], *, num_ranks: int, num_gpus: int
) -> contextlib.AbstractContextManager[Starter]:
    """Choose how the ranks start: no device has been used by forked ones yet."""
    if not num_gpus:
        return Forked(module, given, num_ranks=num_ranks)
    command = [sys.executable, *STANDALONE, "--nproc-per-node", str(num_ranks)]
    return contextlib.nullcontext(Commands(module=module, arguments=given, num_ranks=num_ranks, command=command))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Check the settings, and run on this machine: one process for each GPU, two without a GPU.",
        epilog="settings are documented in docs/configuration.md, exit codes in docs/faults.md",
    )
    parser.add_argument("module", choices=MODULES)
    parser.add_argument("config", help="TOML file")
    parser.add_argument("override", nargs="*", help="section.key=value, read as TOML")
    parser.add_argument("--nproc", "--ranks", type=int, help="another number of processes")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, and stop")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.nproc is not None and arguments.nproc < 1:
        parser.error(f"--nproc {arguments.nproc}: a run has at least 1 process")
    return arguments


def program_of(module: str) -> Callable[[Sequence[str]], int]:
    """Import a program of ranks, which takes seconds, and return its `main`."""
    program: Callable[[Sequence[str]], int] = importlib.import_module(module).main
    return program


if __name__ == "__main__":
    sys.exit(main())
