"""A long run takes no more at its end than near its beginning: memory, files, segments and threads of every rank."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.helpers.small_run import rows, start_torchrun

NUM_STEPS, SETTLED_STEPS = 300, 150  # by the second, every cache has been filled
LIMIT_S = 1500.0
RSS_KIB_PER_STEP = 24  # 1.2 GiB in 50,000 steps

Reading = dict[str, float]


def reading(rank: psutil.Process) -> Reading:
    with rank.oneshot():
        return {
            "rss_kib": rank.memory_info().rss / 1024,
            "files": rank.num_fds(),
            "threads": rank.num_threads(),
            "children": len(rank.children(recursive=True)),
            "segments": len(segments(rank.pid)),
        }


def segments(pid: int) -> set[str]:
    """The shared memory that a process has mapped or that bears its number; others on the machine have theirs."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split()[5] for line in maps if "/dev/shm/" in line}
    return mapped | {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if f"_{pid}_" in name}


def readings(job: subprocess.Popen[str], run: Path) -> Iterator[tuple[int, list[Reading]]]:
    """(step, of each rank) from time to time, until the run is about to end."""
    deadline = time.monotonic() + LIMIT_S
    ranks: list[psutil.Process] = []
    while job.poll() is None:
        assert time.monotonic() < deadline, "the run takes too long"
        time.sleep(0.5)
        step = len(rows(run)) - 1 if (run / "metrics.jsonl").exists() else 0
        if not SETTLED_STEPS <= step < NUM_STEPS - 1:
            continue
        children = psutil.Process(job.pid).children()
        ranks = ranks or [child for child in children if "spmdrl.train" in " ".join(child.cmdline())]
        yield step, [reading(rank) for rank in ranks]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_nothing_grows_over_300_steps(folder: Path) -> None:
    settings = [f"run.num_steps={NUM_STEPS}", "run.name=soak", "eval.every=20", "checkpoint.every=10"]
    job = start_torchrun(2, str(folder / "c.toml"), *settings, stdout=subprocess.DEVNULL)
    try:
        found = list(readings(job, folder / "runs/soak"))
        assert job.wait(60) == 0
    finally:
        job.kill()
    steps = np.array([step for step, _ in found])
    assert steps.max() - steps.min() > NUM_STEPS / 4, "too few readings"
    for rank in range(2):
        columns = {name: np.array([of_ranks[rank][name] for _, of_ranks in found]) for name in found[0][1][rank]}
        growth = np.polyfit(steps, columns.pop("rss_kib"), 1)[0]
        assert growth < RSS_KIB_PER_STEP, f"rank {rank} grows by {growth:.1f} KiB a step"
        # The least of them: a checkpoint that is just written takes files and a thread, and gives them back.
        for name, values in columns.items():
            early, late = (values[part].min() for part in (steps < np.median(steps), steps >= np.median(steps)))
            assert late <= early, f"rank {rank}: {name} were {early:g} at least, and later {late:g}"
