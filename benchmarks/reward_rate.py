"""Count the rewards that one rank's workers compute in a second, and what each takes of the processors.

    python benchmarks/reward_rate.py --workers 4 --rewards 10000 --repeats 5

The reward is the comparison of two words, so that what is measured is the way to a worker and back, and the end of
everything that a rollout has left in its sandbox. Two pools compute rewards in turn, one with a sandbox and one
without. The time of the processors is taken of this process, which stands for the rank and collects rewards and garbage
as a rank does, and of the workers. How many rewards a second were reached depends on what else the machine did. Prints
one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import json
import os
import sys
import time
from contextlib import ExitStack

import psutil

from spmdrl.config import RewardConfig
from spmdrl.rewards.client import RewardPool
from spmdrl.rewards.worker import RewardItem

MODES = ("strict", "off")
TARGET_PER_S, CORES = 10_000, 2

ITEM = RewardItem(
    prompt="What is 17 + 25? Answer with the number alone, please. " * 4,
    response="42",
    answer="42",
    metadata={"level": 3},
    task="sums",
)


def main() -> None:
    """Measure both pools, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="processes of each pool")
    parser.add_argument("--rewards", type=int, default=10_000, help="of each pool and round")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    load_average = os.getloadavg()
    found: dict[str, dict[str, list[float]]] = {
        mode: {"rewards_per_s": [], "rank_us": [], "worker_us": []} for mode in MODES
    }
    with ExitStack() as stack:
        pools = {}
        for mode in MODES:
            before = set(psutil.Process().children())
            pool = stack.enter_context(RewardPool(config(mode, args.workers)))
            pools[mode] = pool, [child for child in psutil.Process().children() if child not in before]
        gc.collect()
        gc.freeze()
        for _ in range(args.repeats):
            for mode, (pool, workers) in pools.items():
                for name, value in measure(pool, workers, args.rewards).items():
                    found[mode][name].append(value)
    for numbers in found.values():
        pairs = zip(numbers["rank_us"], numbers["worker_us"], strict=True)
        numbers["cpu_us"] = [rank_us + worker_us for rank_us, worker_us in pairs]
    print(
        json.dumps(
            {
                "modes": found,
                "workers": args.workers,
                "rewards": args.rewards,
                "room_us": CORES * 1e6 / TARGET_PER_S,
                "load_average": load_average,
                "versions": {"python": sys.version.split()[0]},
            }
        )
    )


def config(mode: str, num_workers: int) -> RewardConfig:
    """The reward table of a run."""
    return RewardConfig.model_validate(
        {"terms": ({"kind": "exact"},), "num_workers": num_workers, "sandbox": {"mode": mode}}
    )


def measure(pool: RewardPool, workers: list[psutil.Process], num_rewards: int) -> dict[str, float]:
    """Compute some rewards at once."""
    ours, theirs, began = time.process_time(), cpu_s(workers), time.perf_counter()
    outcomes = [pool.submit(ITEM) for _ in range(num_rewards)]
    concurrent.futures.wait(outcomes)
    assert all(outcome.result().reward == 1.0 for outcome in outcomes)
    return {
        "rewards_per_s": num_rewards / (time.perf_counter() - began),
        "rank_us": (time.process_time() - ours) / num_rewards * 1e6,
        "worker_us": (cpu_s(workers) - theirs) / num_rewards * 1e6,
    }


def cpu_s(workers: list[psutil.Process]) -> float:
    """The time that workers, and the processes below them, have had of the processors so far."""
    processes = [process for worker in workers for process in (worker, *worker.children(recursive=True))]
    times = [process.cpu_times() for process in processes]
    return sum(found.user + found.system for found in times)


if __name__ == "__main__":
    main()
