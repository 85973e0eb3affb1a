"""Run a function on N gloo ranks and take the verdict from what each rank reports, not from its exit code."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from spmdrl.dist.launcher import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.preloaded"])


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call function(*arguments) on each of `num_ranks` ranks; return their results in rank order.

    Raises AssertionError with every rank's traceback when one fails, and after `timeout_s` (stacks are dumped).
    """
    port = free_port()
    readers, processes = [], []
    for rank in range(num_ranks):
        reader, writer = _CONTEXT.Pipe(duplex=False)
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        process = _CONTEXT.Process(target=_rank, args=(writer, environment, timeout_s, function, arguments))
        process.start()
        writer.close()
        readers.append(reader)
        processes.append(process)
    try:
        reports = [_report(rank, reader, timeout_s) for rank, reader in enumerate(readers)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    failures = [text for failed, text in reports if failed]
    assert not failures, "\n".join(failures)
    return [result for _, result in reports]


def _report(rank: int, reader: Connection, timeout_s: float) -> tuple[bool, Any]:
    if not wait([reader], timeout=timeout_s + 10):
        return True, f"rank {rank} said nothing within {timeout_s} s; its stacks are on stderr"
    try:
        return pickle.loads(reader.recv_bytes())
    except EOFError:
        return True, f"rank {rank} died without a word"


def _rank(
    writer: Connection, environment: dict[str, str], timeout_s: float, function: Callable[..., Any], arguments: tuple
) -> None:
    os.environ.update(environment)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__)
    try:
        report = (False, function(*arguments))
    except BaseException:
        report = (True, f"rank {environment['RANK']}:\n{traceback.format_exc()}")
    # By value: a tensor sent the usual way is a handle into a process that is about to end.
    writer.send_bytes(pickle.dumps(report))
    writer.close()
    # A gloo worker that used FSDP2 may abort while it exits, after it has done all its work.
    os._exit(0)
