"""Count what one store answers to engines that take tickets, and how many engines may wait for tickets at once.

    python benchmarks/tickets.py --engines 64 --seconds 2

The store is the one of a run: torch's TCPStore, in a process of its own. Few processes hold a connection for each
engine, and let the engines look for tickets in turn, with the tickets of a run: as an engine does that has room while
all permits are held, which happens with dynamic sampling. What counts is the processor time of the store for each
request, because one thread serves it: its inverse is the most that it can answer. What it did answer depends on what
else the machine did. Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.dist.session import listening_store
from spmdrl.rollout.scheduler import POLL_S
from spmdrl.rollout.tickets import SharedTickets

NUM_PROCESSES = 2
GROUPS = 8192  # of a step that every engine is to see the beginning of
NODE = 8  # engines
HOST = "127.0.0.1"
PATIENCE = timedelta(minutes=5)


class CountingStore(dist.Store):
    """A store in this process that counts the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self._values: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        """Change a counter and return its value."""
        self.num_requests += 1
        self._values[key] = self._values.get(key, 0) + amount
        return self._values[key]


def main() -> None:
    """Measure each number of engines, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", nargs="+", type=int, default=[64], help="that hold a connection")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each number of engines")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    load_average = os.getloadavg()
    requests = {"look": count_look(), "open": count_opening()}
    found = {str(count): measure(count, args.seconds, args.repeats) for count in args.engines}
    for count, numbers in found.items():
        asked = int(count) * requests["look"] / POLL_S
        numbers["asked_per_s"] = asked
        numbers["busy"] = [asked * us / 1e6 for us in numbers["store_us"]]
    print(
        json.dumps(
            {
                "engines": found,
                "requests": requests,
                "poll_s": POLL_S,
                "load_average": load_average,
                "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            }
        )
    )


def look(tickets: SharedTickets) -> None:
    """Ask what an engine asks that waits, each `POLL_S`: see `EnginePart` in spmdrl/rollout/part.py."""
    assert not tickets.is_over()
    assert not tickets.is_interrupted()
    assert tickets.take() is None
    assert not tickets.is_empty()


def full(store: dist.Store) -> SharedTickets:
    """Tickets of a step of which all permits are held, once somebody has taken them."""
    return SharedTickets(store, step=1, wanted=GROUPS, permits=1, num_tickets=GROUPS)


def count_look() -> int:
    """Count the requests of an engine that waits, each time it looks."""
    store = CountingStore()
    tickets = full(store)
    tickets.take()
    before = store.num_requests
    look(tickets)
    return store.num_requests - before


def count_opening() -> int:
    """Count the requests of an engine for each group that it opens."""
    store = CountingStore()
    tickets = SharedTickets(store, step=1, wanted=GROUPS, permits=GROUPS, num_tickets=GROUPS)
    assert not tickets.is_over()
    assert not tickets.is_interrupted()
    assert tickets.take() == 0
    return store.num_requests


def measure(num_engines: int, seconds: float, repeats: int) -> dict[str, Any]:
    """Let this many engines wait at one store, a few times."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,))
    server.start()
    port = ours.recv()
    begin, pipes, clients = context.Barrier(NUM_PROCESSES + 1), [], []
    for index in range(NUM_PROCESSES):
        mine, its = context.Pipe()
        share = len(range(index, num_engines, NUM_PROCESSES))
        clients.append(context.Process(target=wait_for_tickets, args=(port, share, seconds, repeats, begin, its)))
        clients[-1].start()
        pipes.append(mine)
    found: dict[str, Any] = {"requests_per_s": [], "store_us": []}
    for _ in range(repeats):
        begin.wait(PATIENCE.total_seconds())
        before, began = cpu_s(server.pid), time.perf_counter()
        num_requests = sum(pipe.recv() for pipe in pipes)
        found["requests_per_s"].append(num_requests / (time.perf_counter() - began))
        found["store_us"].append((cpu_s(server.pid) - before) / num_requests * 1e6)
    for client in clients:
        client.join()
    ours.send("end")
    server.join()
    return found


def serve(pipe: Connection) -> None:
    """Be the process of the store until the other end says so."""
    store = listening_store(HOST, HOST)
    full(store).take()
    pipe.send(store.port)
    pipe.recv()


def wait_for_tickets(
    port: int, num_engines: int, seconds: float, repeats: int, begin: Barrier, pipe: Connection
) -> None:
    """Be some of the engines, each with a connection of its own, and let them look in turn."""
    first = dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
    with ThreadPoolExecutor(256) as pool:  # a connection waits for the name of the machine
        engines = [full(store) for store in pool.map(lambda _: first.clone(), range(num_engines))]
    for _ in range(repeats):
        begin.wait(PATIENCE.total_seconds())
        num_looks, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            for engine in engines:
                look(engine)
            num_looks += num_engines
        pipe.send(num_looks * LOOK)


def cpu_s(pid: int | None) -> float:
    """Return the processor time of a process so far."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        after_name: Mapping[int, str] = dict(enumerate(file.read().rpartition(")")[2].split(), start=3))
    return (int(after_name[14]) + int(after_name[15])) / os.sysconf("SC_CLK_TCK")


LOOK = count_look()

if __name__ == "__main__":
    main()
