"""Write docs/gpu-confirmed.md from what `launch/gpu_proof.sh` wrote: `python -m tests.gpu.proof.gpu_report [FILE ...]`.

Without files it reads benchmarks/results/gpu-proof-*.json. Each claim has a row, with what the newest file says of its
tests and steps, or "not yet run"; then come the figures, and where and when they were measured.
`--emulated LINES` writes down what tests/gpu showed on the emulated device, which has a column of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.commit import ROOT, commit_id
from spmdrl.config.strict import as_written, read_json
from spmdrl.faults.text import Parser, say
from spmdrl.tools.program import program
from spmdrl.types import UserError
from tests.gpu.proof import tests_seen
from tests.gpu.proof.claims import Claim, claims
from tests.gpu.proof.run import FAILED, KILLED, NOT_REACHED, PASSED, RUNNING, Record

_INTRODUCTION = """\
# What a GPU has confirmed

<!-- Generated from benchmarks/results/gpu-proof-*.json by `python -m tests.gpu.proof.gpu_report`; a test compares. -->

Every claim about GPUs, with what was **seen on a GPU** of the tests of `tests/gpu` and the benchmarks that show it; the
column **emulated** is no GPU: it is the same tests on a CPU that plays CUDA devices
(`tests/emulated_cuda/README.md`). SGLang's own CUDA processes are not in it: `tests/fake_cuda/README.md` says what they
did on stand-ins for CUDA's libraries, where kernels compute nothing.
[gpu.md](gpu.md#the-first-minutes-on-a-gpu) says how to run them. "Not yet run" means that the code is written and no
GPU has confirmed it; [guarantees.md](guarantees.md) lists what a CPU shows.
"""
_NONE = "**No GPU has run any of it yet.**\n"
_EMULATED = ROOT / "benchmarks/results/emulated-device.json"
_IN_SHORT = {"confirmed": "passed", "in part": "in part", "failed": "failed"}  # by how a finding begins

Kind = Literal["passed", "failed", "not run"]

NO_EVIDENCE = "not yet run: no test or benchmark covers it"
_WRONG = (FAILED, KILLED, RUNNING)
_MAX_FAILURES = 3  # that a row shows


@program("cannot report")
def main(argv: Sequence[str] | None = None) -> None:
    """Write the page, and say from what."""
    parser = Parser(prog="python -m tests.gpu.proof.gpu_report", description=__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", type=Path, help="gpu-proof-*.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/gpu-confirmed.md", help="the page to write")
    parser.add_argument("--emulated", metavar="LINES", type=Path, help="what `make test-gpu DEVICE=emulated` saw")
    arguments = parser.parse_args(argv)
    files = arguments.files or committed(ROOT)
    if arguments.emulated:
        _EMULATED.write_text(json.dumps(_emulated_record(arguments.emulated), indent=1) + "\n", encoding="utf-8")
    arguments.page.write_text(page(_records(files), claims(), emulated=emulated()), encoding="utf-8")
    say(f"{arguments.page}: from {', '.join(str(path) for path in files) or 'no results'}")


def _records(files: Sequence[Path]) -> dict[str, Record]:
    """Read the files, by their names. Raises UserError when one is no record, or two have one name."""
    records: dict[str, Record] = {}
    for path in files:
        if path.stem in records:
            raise UserError(f"two files are called {path.name}; name each after its machine")
        records[path.stem] = _read(path)
    return records


def committed(root: Path) -> list[Path]:
    """Return the files of results that are in the repository."""
    return sorted((root / "benchmarks/results").glob("gpu-proof-*.json"))


def emulated() -> Mapping[str, Outcome]:
    """Return the outcome of each test on the emulated device, by its name; nothing where no run was recorded."""
    return outcomes({_EMULATED.stem: read_json(_EMULATED, dict[str, Any])}) if _EMULATED.exists() else {}


def _emulated_record(lines: Path) -> Record:
    """The record of a run of tests/gpu on the emulated device. Raises UserError when no test was run."""
    seen = tests_seen.read(lines)
    if not seen:
        raise UserError(
            f"{lines} names no test; run `make test-gpu DEVICE=emulated` with {tests_seen.FILE_VARIABLE} set"
        )
    status = FAILED if seen["failed"] else PASSED
    step = {"name": "emulated", "command": "make test-gpu DEVICE=emulated", "status": status, "tests": seen}
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit_id(ROOT, None),
        "steps": [step],
    }


def page(
    records: Mapping[str, Record],
    shown: Sequence[Claim],
    *,
    emulated: Mapping[str, Outcome] | None = None,
) -> str:
    """Return the page for these records, by name of their file, and for what the emulated device showed."""
    seen = outcomes(records)
    parts = [_INTRODUCTION]
    parts += _where(records) if records else [_NONE]
    for title, some in groupby(shown, key=lambda claim: claim.section):
        rows = [("claim", "seen on a GPU", "in", "emulated", "shown by")]
        for claim in some:
            finding, short = judge(claim, seen), _in_short(claim, emulated or {})
            rows.append((claim.sentence, finding.result, ", ".join(finding.records), short, _evidence(claim)))
        parts.append(f"## {title}\n\n{_table(rows)}")
    parts += _figures(records)
    return "\n".join(parts)


def _read(path: Path) -> Record:
    record: Record = read_json(path, dict[str, Any])
    if not {"date", "commit", "machine", "versions", "steps"} <= record.keys():
        raise UserError(f"{path} was not written by launch/gpu_proof.sh; name a gpu-proof-STAGE.json")
    with as_written(path, "launch/gpu_proof.sh"):
        page({path.stem: record}, [])
    if not record["machine"].get("devices"):
        raise UserError(f"{path} is of a machine without a CUDA device, or of one that could not use it; leave it out")
    return record


def _where(records: Mapping[str, Record]) -> Iterator[str]:
    """The section about machines, versions and dates."""
    rows = [("file", "devices", "driver, CUDA", "versions", "date", "commit", "steps that passed")]
    for name, record in sorted(records.items()):
        machine, versions = record["machine"], record["versions"]
        statuses = [step["status"] for step in record["steps"]]
        rows.append(
            (
                name,
                ", ".join(machine.get("devices", [])) or "none",
                f"{machine.get('driver') or '-'}, {machine.get('cuda') or '-'}",
                ", ".join(f"{package} {version}" for package, version in versions.items()),
                record["date"].partition("T")[0],
                _short(record["commit"]),
                f"{statuses.count(PASSED)} of {len(statuses)}",
            )
        )
    yield f"## Where and when\n\n{_table(rows)}"
    if notes := [f"- {name}: {record['note']}" for name, record in sorted(records.items()) if record.get("note")]:
        yield "\n".join([*notes, ""])


def _figures(records: Mapping[str, Record]) -> Iterator[str]:
    """A section for each step whose program printed rows of numbers, also where something else in it failed."""
    for name, record in sorted(records.items()):
        for step in record["steps"]:
            measured = [dict(_scalars(row)) for row in step.get("figures", {}).get("rows", [])]
            columns = list(dict.fromkeys(column for row in measured for column in row))
            rows = [columns, *([_shown(row.get(column)) for column in columns] for row in measured)]
            if columns:
                about = f"`{step['command']}`, {step['status']}, in {name}"
                yield f"## Figures: {step['name']}\n\n{about}\n\n{_table(rows)}"


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of a row and of the rows inside it that are numbers or words; series are left to the file."""
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key} ")
        elif isinstance(value, str | int | float):
            yield f"{prefix}{key}", value


def _short(commit: str) -> str:
    """The first digits of a commit, and whether files differed from it."""
    digits, space, rest = commit.partition(" ")
    return f"{digits[:10]}{space}{rest}"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _in_short(claim: Claim, seen: Mapping[str, Outcome]) -> str:
    """Say in a word or two what the emulated device showed of a claim."""
    result = judge(claim, seen).result
    return next((short for start, short in _IN_SHORT.items() if result.startswith(start)), "no")


def _evidence(claim: Claim) -> str:
    """Tests by file, then steps."""
    by_file: dict[str, list[str]] = {}
    for test in claim.tests:
        file, _, name = test.partition("::")
        by_file.setdefault(file, []).append(f"`{name}`")
    parts = [f"`tests/gpu/test_{file}.py`: {', '.join(names)}" for file, names in by_file.items()]
    return "; ".join([*parts, *(f"step `{step}`" for step in claim.steps)])


def _table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its head."""
    lines = [f"| {' | '.join(' '.join(cell.split()).replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n"


# What the records show of each test and step, and what follows for a claim.


class Outcome(NamedTuple):
    """The newest record of a test, of a file of tests or of a step."""

    name: str
    kind: Kind
    record: str  # the name of the file
    reason: str = ""  # of a failure, or why it was not run


class Finding(NamedTuple):
    """The evidence of the records for a claim."""

    result: str
    records: tuple[str, ...]  # names of the files it follows from; none where nothing was seen


def outcomes(records: Mapping[str, Record]) -> Mapping[str, Outcome]:
    """Return the newest outcome of each test, file and step by its name; one that was not run replaces no other."""
    found: dict[str, Outcome] = {}
    for name, record in sorted(records.items(), key=lambda item: item[1]["date"]):
        for step in record["steps"]:
            for outcome in _of_step(step, name):
                if outcome.kind != "not run" or found.get(outcome.name, outcome).kind == "not run":
                    found[outcome.name] = outcome
    return found


def judge(claim: Claim, seen: Mapping[str, Outcome]) -> Finding:
    """Say what was seen of a claim: a failure first, else whether all of its evidence was there."""
    evidence = {name: _about(name, seen) for name in (*claim.tests, *claim.steps)}
    flat = list(dict.fromkeys(outcome for found in evidence.values() for outcome in found))
    of = {kind: [outcome for outcome in flat if outcome.kind == kind] for kind in ("passed", "failed", "not run")}
    missing = [name for name, found in evidence.items() if not any(outcome.kind == "passed" for outcome in found)]
    if not evidence:
        return Finding(result=NO_EVIDENCE, records=())
    if of["failed"]:
        shown = [f"`{one.name}`: {one.reason}" for one in of["failed"][:_MAX_FAILURES]]
        others = len(of["failed"]) - len(shown)
        result = f"failed: {'; '.join(shown)}{f'; and {others} more' if others else ''}"
    elif not missing and not of["not run"]:
        result = f"confirmed, by {_counted(len(of['passed']))}" if claim.tests else "ran; the figures are below"
    elif of["passed"]:
        seen_in_part = (evidence[name] for name in evidence if name not in missing)
        cases = [outcome.name for found in seen_in_part for outcome in found if outcome.kind == "not run"]
        names = ", ".join(f"`{name}`" for name in (*missing, *cases))
        result = f"in part, by {_counted(len(of['passed']))}; not yet run: {names}{_but(of['not run'])}"
    else:
        result = f"not yet run{_but(of['not run'])}"
    ran = of["passed"] + of["failed"]
    return Finding(result=result, records=tuple(sorted({outcome.record for outcome in ran})))


def _of_step(step: Record, record: str) -> Iterator[Outcome]:
    """The outcome of a step, of the file whose tests it runs, and of each test."""
    status, reason = step["status"], _reason(step)
    kind: Kind = "passed" if status == PASSED else "failed" if status in _WRONG else "not run"
    yield Outcome(name=step["name"], kind=kind, reason=reason, record=record)
    file = step["command"].split()[-1]
    if file.startswith("tests/") and kind != "passed":
        # Of tests that did not begin: those that did have an outcome of their own.
        yield Outcome(name=file, kind="not run", reason=reason, record=record)
    seen = step.get("tests", {})
    for name in seen.get("passed", {}):
        yield Outcome(name=_test_name(name), kind="passed", record=record)
    for name, why in seen.get("failed", {}).items():
        if status == KILLED and name == seen.get("last"):  # it was ended with its step: what it shows is not known
            yield Outcome(name=_test_name(name), kind="not run", reason=reason, record=record)
        else:
            yield Outcome(name=_test_name(name), kind="failed", reason=why, record=record)
    for name, why in seen.get("skipped", {}).items():
        yield Outcome(name=_test_name(name), kind="not run", reason=why, record=record)


def _reason(step: Record) -> str:
    """Say why a step did not pass."""
    last = next((line.strip() for line in reversed(step.get("tail", [])) if line.strip()), "")
    return {
        PASSED: "",
        FAILED: f"exit code {step.get('exit_code')}{f': {last}' if last else ''}",
        KILLED: f"killed after {step.get('seconds', 0):.0f} s",
        RUNNING: "the stage was killed",
        NOT_REACHED: "no time was left",
    }.get(step["status"], "")


def _test_name(test: str) -> str:
    """`memory::test_x[case]` for `tests/gpu/test_memory.py::test_x[case]`; a file keeps its path."""
    file, colons, name = test.partition("::")
    return f"{Path(file).stem.removeprefix('test_')}::{name}" if colons else file


def _about(name: str, seen: Mapping[str, Outcome]) -> list[Outcome]:
    """The outcomes of a step or a test in all of its cases, or of the file that was to run it."""
    cases = [outcome for key, outcome in seen.items() if key == name or key.startswith(f"{name}[")]
    file = f"tests/gpu/test_{name.partition('::')[0]}.py"
    return cases or ([seen[file]] if file in seen else [])


def _counted(passed: int) -> str:
    return f"{passed} test{'' if passed == 1 else 's'}"


def _but(not_run: Iterable[Outcome]) -> str:
    reasons = sorted({outcome.reason for outcome in not_run if outcome.reason})
    return f" ({'; '.join(reasons)})" if reasons else ""


if __name__ == "__main__":
    sys.exit(main())
