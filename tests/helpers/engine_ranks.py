"""Ranks whose SGLang engines start in a second instead of twenty: all that is imported is there before they fork.

A rank comes from a server that has imported SGLang. Before it does anything it forks processes that wait, and its
engine gets one of them wherever SGLang would spawn one: with the same environment, and after the same
`sitecustomize.py`. Real starts, all of them slow tests, are in test_death.py, test_stubs.py and tests/e2e.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
from collections.abc import Callable
from multiprocessing import context, forkserver, util
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any
from unittest.mock import patch

import torch

from spmdrl.engine.sglang import options as sglang_options
from spmdrl.engine.sglang.surroundings import STARTUP
from tests.helpers import sglang_delta_net, sglang_fp8
from tests.helpers.ranks import run_ranks

START_LIMIT_S = 240.0  # two cores that are busy with other things
SPARES = 3  # of each rank: the schedulers of an engine on two devices, and one that is started again

_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload(["tests.helpers.preloaded_sglang"])


def run_engine_ranks(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = START_LIMIT_S
) -> list[Any]:
    """Do what `run_ranks` does, on ranks that have imported SGLang."""
    with patch.object(forkserver, "connect_to_new_process", _SERVER.connect_to_new_process):
        return run_ranks(num_ranks, with_spares, function, *arguments, timeout_s=timeout_s)


def with_spares(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function on a rank that has one thread yet, and whose engines get processes that are forked now."""
    forking = multiprocessing.get_context("fork")
    util.get_temp_dir()  # for what is handed to spares; made while an engine starts, it would end with that engine
    spares = []
    for _ in range(SPARES):
        theirs, mine = forking.Pipe(duplex=False)
        process = forking.Process(target=_wait_and_run, args=(theirs, os.getpid()))
        process.start()
        theirs.close()
        spares.append((process, mine))
    spawn = context.SpawnProcess._Popen  # type: ignore[attr-defined]

    def popen(process: Any) -> Any:
        """Start a process of multiprocessing; returns what it waits by."""
        if not spares:
            return spawn(process)
        spare, pipe = spares.pop()
        work = ForkingPickler.dumps((process._target, process._args, process._kwargs))
        pipe.send((dict(os.environ), bytes(work)))
        return spare._popen  # type: ignore[attr-defined]

    # Tests that run at the same time search different ranges, as the ranks of one machine do.
    free_port, worker = sglang_options._free_port, int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with (
        patch.object(context.SpawnProcess, "_Popen", popen),
        patch.object(sglang_options, "_free_port", lambda local_rank: free_port(local_rank + 8 * (1 + worker))),
    ):
        return function(*arguments)


def _wait_and_run(pipe: Connection, owner: int) -> None:
    """Wait for work as a new Python that was started for it would begin it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the rank
    if os.getppid() != owner:
        return
    environment, work = pipe.recv()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    runpy.run_path(str(STARTUP / "sitecustomize.py"))
    if not torch.cuda.is_available():
        sglang_delta_net.install()
        sglang_fp8.install()
    target, arguments, options = pickle.loads(work)
    target(*arguments, **options)
