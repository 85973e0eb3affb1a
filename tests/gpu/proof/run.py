"""Run the steps of a stage one after the other, each within its time, and write down how each ended.

The record is on disk before the first step and after each, so that a stage which is killed leaves what it has seen.
Needs nothing but Python: it must run where nothing else does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tests.gpu.proof import tests_seen
from tests.gpu.proof.stages import Stage, Step

PASSED, FAILED, SKIPPED, KILLED = "passed", "failed", "skipped", "killed"
RUNNING, NOT_REACHED = "running", "not reached"  # RUNNING stays where the stage itself was killed
MIN_SHARE = 0.25  # a step that would have less of its limit than this is not begun
STACKS_S = 5.0  # for a process to write its stacks before it is killed
TAIL_LINES = 25
RUNS_LINES = 100  # of each stream of a run that was killed with its test
_NO_TESTS = 5  # the exit code of pytest when a file skips itself
_POLL_S = 0.1
_GONE_S = 10.0  # for killed processes to give back what they hold
_MARK = "SPMDRL_PROOF_STEP"
_ENVIRONMENT = {
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
    "SPT_NOENV": "1",  # setproctitle, which SGLang's processes use, would write their titles over the mark
}

Record = dict[str, Any]


def run_stage(name: str, stage: Stage, *, root: Path, folder: Path, commit: str, at_once: int = 1) -> Record:
    """Run a stage in `root`; return the record, which is in `folder`/gpu-proof-NAME.json, with all output beside it.

    With `at_once` above 1, that many steps run beside each other, and those that must be alone after them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    planned = (stage.facts, *stage.steps)
    record: Record = {
        "stage": name,
        "about": stage.about,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit,
        "machine": {},
        "versions": {},
        "seconds": 0.0,
        "at_once": at_once,
        "steps": [_not_reached(step) for step in planned],
    }
    lock = threading.Lock()

    def run(step: Step, found: Record, log: BinaryIO) -> None:
        left_s = stage.budget_s - (time.monotonic() - began)
        if left_s < MIN_SHARE * step.limit_s:
            return
        with lock:
            found["status"] = RUNNING
            _write(folder, record)
        seen = run_step(step, limit_s=min(step.limit_s, left_s), root=root, log=log, shows_at_end=at_once > 1)
        with lock:
            found |= seen
            if step is stage.facts:
                record.update({key: found["figures"].get(key, {}) for key in ("machine", "versions")})
            record["seconds"] = round(time.monotonic() - began, 1)
            _write(folder, record)

    with open(folder / f"gpu-proof-{name}.log", "wb") as log:
        facts, *others = zip(planned, record["steps"], strict=True)
        run(facts[0], facts[1], log)
        beside = [(step, found) for step, found in others if at_once > 1 and not step.alone]
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda pair: run(pair[0], pair[1], log), beside))
        for step, found in others:
            if at_once == 1 or step.alone:
                run(step, found, log)
    return record


def run_step(step: Step, *, limit_s: float, root: Path, log: BinaryIO, shows_at_end: bool = False) -> Record:
    """Run one step, show its output here and in the log, and say how it ended. No process that it started stays."""
    began = time.monotonic()
    title = f"\n== {step.name}: {' '.join(step.command)}   at most {limit_s:.0f} s\n".encode()
    if not shows_at_end:
        _show(title, log)
    with tempfile.TemporaryDirectory() as scratch:
        output, lines = Path(scratch) / "output", Path(scratch) / "tests"
        with open(output, "wb") as sink, open(output, "rb") as source:
            code, killed = _run(
                step.command,
                _ENVIRONMENT | {tests_seen.FILE_VARIABLE: str(lines), "TMPDIR": scratch},
                limit_s=limit_s,
                root=root,
                sink=sink,
                meanwhile=(lambda: None) if shows_at_end else (lambda: _show(source.read(), log)),
            )
            if killed:
                sink.write("\n".join(_what_runs_wrote(Path(scratch))).encode())
                sink.flush()
            _show(title + source.read() if shows_at_end else source.read(), log)
        seen, text = tests_seen.read(lines), output.read_text(encoding="utf-8", errors="replace")
    found: Record = {
        "status": KILLED if killed else _status(code, seen),
        "exit_code": code,
        "seconds": round(time.monotonic() - began, 1),
        "figures": last_object(text),
    }
    if seen is not None:
        found["tests"] = seen
    if found["status"] not in (PASSED, SKIPPED):
        found["tail"] = text.splitlines()[-(2 * RUNS_LINES if killed else TAIL_LINES) :]
    return found


def _what_runs_wrote(scratch: Path) -> Iterator[str]:
    """Yield the last lines of runs that were not finished, from the files of tests/helpers/small_run.py, and of their
    ranks' logs, which have the stacks of a rank's threads."""
    for path in [*sorted(scratch.glob("torchrun-*")), *sorted(scratch.rglob("logs/rank-*.log"))]:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        yield from ("", f"-- {path.name}: the last of {len(lines)} lines", *lines[-RUNS_LINES:])


def last_object(text: str) -> Record:
    """Return the last line that is a JSON object: what a program of benchmarks/ prints. {} where there is none."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {}


def _run(
    command: tuple[str, ...],
    environment: dict[str, str],
    *,
    limit_s: float,
    root: Path,
    sink: BinaryIO,
    meanwhile: Callable[[], None],
) -> tuple[int, bool]:
    """Run a command to its end or its limit; return its exit code, and True when it was killed."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable if command[0] == "python" else command[0], *command[1:]],
        cwd=root,
        env=os.environ | environment | {_MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def has_ended(within_s: float) -> bool:
        until = time.monotonic() + within_s
        while process.poll() is None and time.monotonic() < until:
            time.sleep(_POLL_S)
            meanwhile()
        return process.poll() is not None

    try:
        killed = not has_ended(limit_s)
        if killed:  # Python's fault handler writes the stacks of all threads
            for one in _processes_with(f"{_MARK}={mark}".encode()):
                if one != process.pid:
                    with suppress(ProcessLookupError):
                        os.kill(one, signal.SIGABRT)
            time.sleep(_POLL_S)
            process.send_signal(signal.SIGABRT)
            has_ended(STACKS_S)
    finally:
        _kill_all(process, f"{_MARK}={mark}".encode())
    code = process.wait()
    meanwhile()
    return code, killed


def _kill_all(process: subprocess.Popen[bytes], mark: bytes) -> None:
    """Kill a process, its group, and every process with the mark in its environment, and wait until they are gone.

    torchrun gives each rank a session of its own. What stays would hold the device's memory while the next step runs: a
    process that is killed shows no environment any more, but gives memory back only when it is gone.
    """
    marked = {process.pid, *_processes_with(mark)}
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    until = time.monotonic() + _GONE_S
    while (left := [one for one in marked if _is_there(one)]) and time.monotonic() < until:
        for one in left:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.poll()
        time.sleep(_POLL_S)
        marked |= {*_processes_with(mark)}


def _is_there(process: int) -> bool:
    """Return False for a process that has ended, also when nobody has asked yet how."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _processes_with(mark: bytes) -> Iterator[int]:
    """Ids of the processes that have it in their environment; one that has ended has none."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has just ended, or is another user's
            if mark in environment.read_bytes():
                yield int(environment.parent.name)


def _status(code: int, seen: tests_seen.Seen | None) -> str:
    """How a step ended that was not killed; tests that were all skipped have shown nothing."""
    if code != 0 and not (code == _NO_TESTS and seen is not None and not seen["failed"]):
        return FAILED
    return SKIPPED if seen is not None and not seen["passed"] else PASSED


def _not_reached(step: Step) -> Record:
    command = " ".join(step.command)
    return {"name": step.name, "command": command, "expected": step.expected, "status": NOT_REACHED}


def _show(output: bytes, log: BinaryIO) -> None:
    for stream in (log, sys.stdout.buffer):
        stream.write(output)
        stream.flush()


def _write(folder: Path, record: Record) -> None:
    """Write the record, complete or not at all."""
    path = folder / f"gpu-proof-{record['stage']}.json"
    unfinished = path.with_suffix(".json.new")
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
