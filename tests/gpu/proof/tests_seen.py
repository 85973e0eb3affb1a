"""Write down each test's outcome when it is known: `pytest -p tests.gpu.proof.tests_seen`.

A test that kills its process, or is killed with it, leaves a line that it has begun; a report that pytest writes at its
end would be lost with everything in it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE_VARIABLE = "SPMDRL_TESTS_SEEN"  # names the file; where it is not set, nothing is written
UNFINISHED = "began and did not end"
_MAX_REASON_CHARACTERS = 400

Seen = dict[str, Any]


def read(path: Path) -> Seen | None:
    """Return the tests of a process; None where it ran none.

    `counts` has numbers, `passed` seconds by test id, `failed` and `skipped` reasons by test id, or by file where that
    could not be loaded. `last` is the test that began last.
    """
    if not path.is_file():
        return None
    last: dict[str, dict[str, Any]] = {}
    begun = None
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # the process was killed while it wrote its last line
            row = json.loads(line)
            last[row["id"]] = row
            begun = row["id"] if row.get("reason") == UNFINISHED else begun
    of = {name: [row for row in last.values() if row["outcome"] == name] for name in ("passed", "failed", "skipped")}
    return {
        "counts": {name: len(rows) for name, rows in of.items()},
        "passed": {row["id"]: row["seconds"] for row in of["passed"]},
        **{name: {row["id"]: row["reason"] for row in of[name]} for name in ("failed", "skipped")},
        "last": begun,
    }


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write that a test begins."""
    _write(id=nodeid, outcome="failed", reason=UNFINISHED)


def pytest_runtest_logreport(report: Any) -> None:
    """Write how a test, or its set-up or its clearing up, ended."""
    if report.outcome != "passed":
        _write(id=report.nodeid, outcome=report.outcome, reason=_reason(report))
    elif report.when == "call":
        _write(id=report.nodeid, outcome="passed", seconds=round(report.duration, 3))


def pytest_collectreport(report: Any) -> None:
    """Write that a file could not be loaded, or skips all of its tests."""
    if report.outcome != "passed":
        _write(id=report.nodeid, outcome=report.outcome, reason=_reason(report))


def _reason(report: Any) -> str:
    """The first line of what a test raised, or why it was skipped."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        text = report.longrepr[2].removeprefix("Skipped: ")
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else report.longreprtext.strip().splitlines()[-1].removeprefix("E ")
    return text.strip().partition("\n")[0][:_MAX_REASON_CHARACTERS]


def _write(**row: Any) -> None:
    if path := os.environ.get(FILE_VARIABLE):
        with open(path, "a", encoding="utf-8") as file:  # closed, so that nothing is lost with the process
            file.write(json.dumps(row) + "\n")
