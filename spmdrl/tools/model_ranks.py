"""Work of `spmdrl model` on two ranks of this machine, which start from one process that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

RANKS = 2
_CONTEXT = multiprocessing.get_context("forkserver")
_PATIENCE_S = 240.0


def prepare(module: str) -> None:
    """Let the process that ranks are forked from import a module, in the background."""
    _CONTEXT.set_forkserver_preload([module])
    _CONTEXT.Process(target=os.getpid).start()


def on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call function(*arguments) on two gloo ranks; returns their results in the order of ranks.

    What one of them raises is raised here, TimeoutError when one says nothing for minutes.
    """
    meeting = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
    calls = [(meeting | {"RANK": rank, "LOCAL_RANK": rank}, function, arguments) for rank in range(RANKS)]
    with _CONTEXT.Pool(RANKS) as pool:  # its end kills the ranks: one that used FSDP2 may abort when it exits by itself
        return [pickle.loads(found) for found in pool.starmap_async(_rank, calls, chunksize=1).get(_PATIENCE_S)]


def _rank(place: dict[str, Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    """Return by value what the function does: a tensor sent otherwise is a handle into a process that ends."""
    variables = place | {"OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": ""}
    os.environ.update({name: str(value) for name, value in variables.items()})
    return pickle.dumps(function(*arguments))


def _free_port() -> int:
    """Find a port below those that Linux gives to connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 20_000)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
