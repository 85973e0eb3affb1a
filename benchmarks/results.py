"""Result files of benchmarks: what each says about where it comes from."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import commit

ROOT = commit.ROOT
RESULTS = ROOT / "benchmarks" / "results"

Json = Mapping[str, Any]


def provenance() -> dict[str, Any]:
    """The entries of a result file that say when, on what, and at which commit it is measured: call it before."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit_id(),
        "machine": machine(),
    }


def write_result(path: Path, content: Json, *, indent: int | None = 1) -> None:
    """Write a result file, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".json.new")
    unfinished.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
    unfinished.replace(path)


def print_result(content: Json, path: Path | None) -> None:
    """Print a result as JSON, and write it to a file where one is given."""
    if path is not None:
        write_result(path, content)
    print(json.dumps(content))


def commit_id() -> str:
    """The commit that is measured, marked when files differ from it (the results themselves aside)."""
    return commit.commit_id(ROOT, ROOT / "bundle" / "commit.json")


def machine() -> Mapping[str, Any]:
    """Describe this machine."""
    from spmdrl.model.machine import processor  # it needs torch, which reading results does not

    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }
