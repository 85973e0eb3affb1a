"""Time what is done with all files of a checkpoint, when there are many: one for each of 1,000 ranks, and of 10,000.

    python benchmarks/checkpoint_files.py --files 1000 10000 --repeats 5

Each file stands for what one rank wrote, in 4 KiB: what counts here is how many there are. A manifest is written and
read again; all files are compared with it, on one rank; retention chooses by the manifests of three such checkpoints; a
launch looks for the newest complete one, of which the last is broken; one is removed. The times are those of the
processor. Growth is the time for many files over that for few, each per file: 1 is linear. Prints one JSON object;
`benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmdrl.checkpoint.manifest import (
    STATE,
    TABLE,
    Digest,
    Manifest,
    compare,
    folder_of,
    glance,
    problems_of,
    remove,
    saved_steps,
    superseded,
)

FILE_BYTES = 4096
STEPS = (10, 20, 30)
METRIC = "eval/mean"

Times = dict[str, float]


def main() -> None:
    """Measure every count, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", nargs=2, type=int, default=[1_000, 10_000], help="few, and many")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a directory on the disk to measure; default: the temporary one")
    args = parser.parse_args()
    load_average = os.getloadavg()
    few, many = args.files
    rounds = [{count: measure(count, args.folder) for count in (few, many)} for _ in range(args.repeats)]
    times = {
        name: {str(count): [found[count][name] for found in rounds] for count in (few, many)} for name in rounds[0][few]
    }
    growths = [{name: found[many][name] / found[few][name] * few / many for name in found[few]} for found in rounds]
    growth = {name: statistics.median(growth[name] for growth in growths) for name in growths[0]}
    print(
        json.dumps(
            {
                "files": args.files,
                "file_bytes": FILE_BYTES,
                "times_s": times,
                "growth": growth,
                "many_s": [sum(found[many].values()) for found in rounds],
                "few_s": [sum(found[few].values()) * many / few for found in rounds],
                "load_average": load_average,
                "versions": {"python": sys.version.split()[0]},
            }
        )
    )


def measure(num_files: int, folder: Path | None) -> Times:
    """Time each thing once, with checkpoints of this many files."""
    times: Times = {}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        times[name] = time.process_time() - began

    with tempfile.TemporaryDirectory(dir=folder) as name:
        checkpoints = Path(name)
        *_, manifest = [made(checkpoints, step, num_files) for step in STEPS]
        newest = folder_of(checkpoints, STEPS[-1])
        with timed("write"):
            manifest.write(newest)
        with timed("read"):
            Manifest.read(newest)
        with timed("verify"):
            problems = problems_of(newest, compare)
        assert not problems, problems[0]
        with timed("retention"):
            metric = {step: Manifest.read(folder_of(checkpoints, step)).metrics[METRIC] for step in STEPS}
            old = superseded(metric, keep_last=1)
        assert old == [STEPS[1]], "the first is the best, and the last is kept"
        (newest / TABLE).write_bytes(b"changed")
        with timed("choose"):
            steps = reversed(saved_steps(checkpoints))
            chosen = next(step for step in steps if not problems_of(folder_of(checkpoints, step), glance))
        assert chosen == STEPS[1], "the newest is broken"
        with timed("remove"):
            remove(folder_of(checkpoints, old[0]))
    return times


def made(checkpoints: Path, step: int, num_files: int) -> Manifest:
    """Make a checkpoint of this many files; returns its manifest, which is written."""
    checkpoint = folder_of(checkpoints, step)
    checkpoint.mkdir()
    files = {}
    for name in (STATE, TABLE, *(f"__{rank}_0.distcp" for rank in range(num_files - 2))):
        content = f"{step} {name}".encode().ljust(FILE_BYTES)
        (checkpoint / name).write_bytes(content)
        files[name] = Digest(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    manifest = Manifest(
        step=step, num_ranks=num_files, configuration={}, versions={}, metrics={METRIC: 1.0 / step}, files=files
    )
    manifest.write(checkpoint)
    return manifest


if __name__ == "__main__":
    main()
