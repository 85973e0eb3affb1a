"""The report of what a drill on SLURM has shown."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from pathlib import Path

import torch

from benchmarks import commit
from tests.helpers.slurm_cluster import ROOT, Cluster, write_report


class Drill:
    """The report, in the file that SLURM_REPORT names: deeds and outcomes, in the order of the tests that passed.

    What the file has from drills on the same commit stays.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rows: list[dict[str, str]] = []
        self._commit = commit.commit_id(ROOT, None)

    def record(self, done: str, happened: str) -> None:
        """Add a row to the report, without the names of hosts and the places of this machine's folders."""
        happened = re.sub(r"\(\S+, pid \d+\)", "(HOST, pid N)", happened)
        happened = re.sub(r"process \d+ on \S+,", "process N on HOST,", happened)
        self._rows.append({"done": done, "happened": re.sub(r"/\S*/runs/", "runs/", happened)})
        if path := os.environ.get("SLURM_REPORT"):
            self._write(Path(path))

    def _write(self, path: Path) -> None:
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        mine = {row["done"] for row in self._rows}
        kept = [row for row in before.get("drill", []) if row["done"] not in mine and before["commit"] == self._commit]
        write_report(
            path,
            {
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "commit": self._commit,
                "slurm": self._cluster.call("sinfo", "--version").removeprefix("slurm-wlm "),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "cluster": "launch/slurm_cluster.sh: n1 and n2 with a pretended GPU each, n3 without, one machine",
                "script": "launch/slurm.sbatch, unmodified",
                "drill": [*kept, *self._rows],
            },
        )
