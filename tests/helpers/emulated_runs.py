"""Runs on emulated CUDA devices, in a process of their own: this one has imported torch without devices.

That process forks the ranks of all runs that it is given, one run after the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import NamedTuple

from tests.helpers.ranks import run_ranks

ROOT = Path(__file__).parents[2]
# Not the cache of a test's own home, which is gone when the test ends.
CACHE = os.environ.get("EMULATED_CUDA_CACHE", str(Path.home() / ".cache/spmdrl-emulated-cuda"))


class EmulatedRun(NamedTuple):
    """A launch: its ranks, each on its own device, its overrides, and the step in whose update rank 0 is killed."""

    num_ranks: int
    overrides: list[str]
    killed_in: int | None = None


def run_on_devices(folder: Path, *runs: EmulatedRun, timeout_s: float = 800.0) -> None:
    """Run the configuration in `folder` in each of these ways, and require that each ends as it should."""
    path = os.pathsep.join([str(ROOT / "tests/emulated_cuda/startup"), str(ROOT)])
    devices = {"EMULATED_CUDA_DEVICES": str(max(run.num_ranks for run in runs)), "EMULATED_CUDA_CACHE": CACHE}
    environment = (
        os.environ | devices | {"PYTHONPATH": path, "EMULATED_CUDA_PLAIN_KERNELS": "1", "OMP_NUM_THREADS": "1"}
    )
    command = [sys.executable, "-m", "tests.helpers.emulated_runs", str(folder), json.dumps(runs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


def _run(folder: str, runs: str) -> None:
    from tests.helpers.cuts import cut, entering, nowhere

    for num_ranks, overrides, killed_in in json.loads(runs):
        patch = nowhere if killed_in is None else partial(entering, killed_in, "update", SIGKILL, rank=0)
        try:
            codes = run_ranks(num_ranks, cut, [f"{folder}/c.toml", *overrides], patch, timeout_s=400.0)
            assert killed_in is None and set(codes) == {0}, codes
        except AssertionError as error:
            if killed_in is None or "died without a word" not in str(error):
                raise


if __name__ == "__main__":
    _run(*sys.argv[1:])
