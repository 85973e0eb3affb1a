"""Run a benchmark's program and read what it prints, with what else the machine did meanwhile."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import ROOT, Json


class ProgramFailed(Exception):
    """A program ended with an error or printed no JSON object."""


def run(command: Sequence[str]) -> Json:
    """Run a program from the project's root and return the JSON object that it printed last."""
    print(f"+ {' '.join(command)}", file=sys.stderr, flush=True)
    # "python" in what is written down is the interpreter that runs this program.
    program = sys.executable if command[0] == "python" else str(ROOT / command[0])
    started, busy_before, ours_before = time.perf_counter(), busy_cpu_s(), children_cpu_s()
    try:
        done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ProgramFailed(f"there is no {command[0]}; bash benchmarks/run.sh makes it") from error
    if done.returncode:
        sys.stderr.write(done.stderr)
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ProgramFailed(f"{' '.join(command)} ended with exit code {done.returncode}: {reason}")
    lines = done.stdout.strip().splitlines()
    try:
        output: Json = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise ProgramFailed(f"{' '.join(command)} did not end with a JSON object") from error
    duration_s = time.perf_counter() - started
    others_s = busy_cpu_s() - busy_before - (children_cpu_s() - ours_before)
    print(f"  {duration_s:.0f} s", file=sys.stderr, flush=True)
    return {**output, "cores_used_by_others": round(max(others_s, 0.0) / duration_s, 3)}


def run_again(*options: str) -> Any:
    """Run the program that calls this once more, in a process of its own, with these options after its own arguments.

    Returns the JSON that it prints last.
    """
    done = subprocess.run([sys.executable, *sys.argv, *options], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds(call: Callable[[], object]) -> float:
    """The wall time of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def busy_cpu_s() -> float:
    """CPU seconds that all of the machine's cores have worked, or were taken from it, since it started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def children_cpu_s() -> float:
    """CPU seconds of the programs that have been run so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
