"""Hold claims against the records of stages: what was seen of each test and step, and what follows for a claim."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.gpu.proof.claims import Claim
from tests.gpu.proof.run import FAILED, KILLED, NOT_REACHED, PASSED, RUNNING, Record

Kind = Literal["passed", "failed", "not run"]

NO_EVIDENCE = "not yet run: no test or benchmark covers it"
_WRONG = (FAILED, KILLED, RUNNING)
_MAX_FAILURES = 3  # that a row shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The newest record of a test, of a file of tests or of a step."""

    name: str
    kind: Kind
    reason: str = ""  # of a failure, or why it was not run
    record: str  # the name of the file


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A claim with what was seen of it."""

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
        confirmed = f"confirmed, by {_counted(len(of['passed']))}" if claim.tests else "ran; the figures are below"
        result = confirmed
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
        yield Outcome(name=_short(name), kind="passed", record=record)
    for name, why in seen.get("failed", {}).items():
        yield Outcome(name=_short(name), kind="failed", reason=why, record=record)
    for name, why in seen.get("skipped", {}).items():
        yield Outcome(name=_short(name), kind="not run", reason=why, record=record)


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


def _short(test: str) -> str:
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
