"""Prove on a GPU what no CPU can show, one stage a command: `launch/gpu_proof.sh STAGE` calls this program.

Each stage prints facts about the machine, runs tests and benchmarks whatever fails, and ends with a table. The folder
that it names then holds gpu-proof-STAGE.json, of which `tests.gpu.proof.gpu_report` makes docs/gpu-confirmed.md, and
gpu-proof-STAGE.log with all output. Exit code 0 when everything was as expected, 1 when it was not.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.commit import ROOT, commit_id
from spmdrl.faults.text import Parser, say, tolerates_lost_output
from tests.gpu.proof.run import FAILED, KILLED, NOT_REACHED, PASSED, SKIPPED, Record, run_stage
from tests.gpu.proof.stages import STAGES

_DEFAULT_FOLDER = "runs/gpu-proof"
_MAX_REASONS = 12  # shown below the table; all are in the file


@tolerates_lost_output
def main(argv: Sequence[str] | None = None) -> int:
    """Run a stage; return the exit code."""
    stages = "; ".join(f"{name}: {stage.about}" for name, stage in STAGES.items())
    parser = Parser(prog="launch/gpu_proof.sh", description=__doc__.splitlines()[0], epilog=stages)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--commit-file", type=Path, help="commit.json of the bundle; for a copy without git")
    parser.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="steps beside each other; those that measure run alone"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="STEP", help="these steps of the stage; the files are named after them"
    )
    arguments = parser.parse_args(argv)
    if arguments.at_once < 1:
        parser.error(f"--at-once {arguments.at_once}: at least one step runs at a time; set a number from 1")
    stage, only = STAGES[arguments.stage], arguments.only or []
    if unknown := set(only) - {step.name for step in stage.steps}:
        known = ", ".join(step.name for step in stage.steps)
        parser.error(f"--only {min(unknown)}: stage {arguments.stage} has the steps {known}")
    folder = Path(os.environ.get("OUT") or ROOT / _DEFAULT_FOLDER)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "written").touch()
        (folder / "written").unlink()
    except OSError as error:
        say(f"cannot write to OUT={folder}: {error}; set OUT to a folder that can be written to", sys.stderr)
        return 2
    # A process that is ended with its stacks would leave a core file of its memory too.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    name = "-".join([arguments.stage, *only])
    commit = commit_id(ROOT, arguments.commit_file)
    if only:
        stage = replace(stage, steps=tuple(step for step in stage.steps if step.name in only))
    say(f"stage {arguments.stage}: {stage.about}\ncommit {commit}; at most {stage.budget_s:.0f} s; into {folder}")
    record = run_stage(name, stage, root=ROOT, folder=folder, commit=commit, at_once=arguments.at_once)
    say("\n".join(["", *table(record), "", *reasons(record), verdict(record), f"written: {folder}"]))
    return 0 if is_as_expected(record) else 1


def table(record: Record) -> Iterator[str]:
    """Yield the lines of the table that ends a stage."""
    rows = [("what", "seen", "expected")]
    rows += [(step["name"], seen(step), step["expected"]) for step in record["steps"]]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, found, expected in rows:
        yield f"{name:<{widths[0]}}  {found:<{widths[1]}}  {expected}"


def seen(step: Record) -> str:
    """Say in a few words how a step ended."""
    if "exit_code" not in step:
        return str(step["status"])
    counts = step.get("tests", {}).get("counts", {})
    words = [f"{count} {outcome}" for outcome, count in counts.items() if count]
    if not words or step["status"] == KILLED:
        words.insert(0, step["status"])
    if not counts and step["status"] == FAILED:
        words.append(f"exit code {step['exit_code']}")
    return f"{', '.join(words)}, {step['seconds']:.0f} s"


def reasons(record: Record) -> Iterator[str]:
    """Yield a line for each failure, then the end of the output of programs that failed."""
    lines = [
        f"failed: {test}: {reason}"
        for step in record["steps"]
        for test, reason in step.get("tests", {}).get("failed", {}).items()
    ]
    for step in record["steps"]:
        if "tail" in step and not step.get("tests", {}).get("failed"):
            last = next((line for line in reversed(step["tail"]) if line.strip()), "no output")
            lines.append(f"{step['status']}: {step['name']}: {last}")
    yield from lines[:_MAX_REASONS]
    if len(lines) > _MAX_REASONS:
        yield f"and {len(lines) - _MAX_REASONS} more, in the file"


def verdict(record: Record) -> str:
    """Say in a sentence what the stage has shown."""
    if not record["machine"].get("devices"):
        return "There is no CUDA device here: nothing was proved."
    of = [step["status"] for step in record["steps"]]
    wrong = sum(status not in (PASSED, SKIPPED, NOT_REACHED) for status in of)
    return f"{of.count(PASSED)} of {len(of)} steps passed, {wrong} failed, {of.count(NOT_REACHED)} were not reached."


def is_as_expected(record: Record) -> bool:
    """True when there was a device and every step passed or had nothing to test on it."""
    return bool(record["machine"].get("devices")) and all(
        step["status"] in (PASSED, SKIPPED) for step in record["steps"]
    )


if __name__ == "__main__":
    sys.exit(main())
