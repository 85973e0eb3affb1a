"""The report of `tools.doctor RUN`: what looks wrong in a run, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from spmdrl.faults.text import escaped
from spmdrl.report.findings import RULES, Finding
from spmdrl.report.reading import RecordedRun
from spmdrl.report.series import History

_WIDTH = 110


def checkup(run: RecordedRun, found: Sequence[Finding]) -> Iterator[str]:
    """Yield the lines of a report: how far the run is, then each finding with what it means and what helps."""
    of = "" if run.num_steps is None else f" of {run.num_steps}"
    yield f"{escaped(run.name)}: step {History(run.rows).last_step}{of}"
    if not found:
        yield f"nothing looks wrong to any of {len(RULES)} rules"
    for number, one in enumerate(found, start=1):
        yield ""
        yield f"{number}. {one.rule.name}"
        yield from _paragraph("seen", escaped(one.seen))
        yield from _paragraph("why", one.rule.why)
        yield from _paragraph("do", one.rule.remedy)
        yield from _paragraph("read", f"docs/{one.rule.page}")


def _paragraph(label: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"   {label:<6}",
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )
