"""The report of `tools.doctor RUN`: what looks wrong in a run, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from spmdrl.faults.lock import owner_of
from spmdrl.faults.saved import newest_step
from spmdrl.faults.text import escaped
from spmdrl.report.files import is_torn, read_rows
from spmdrl.report.findings import RULES, Finding
from spmdrl.report.reading import RecordedRun
from spmdrl.report.run_folder import RunFolder
from spmdrl.report.series import History

_WIDTH = 110


def damages(path: Path) -> Iterator[str]:
    """Yield a sentence for what metrics.jsonl of a run lacks. Raises UserError.

    Nothing is torn or behind while a launch writes the file: then only rows between others can be missing.
    """
    folder = RunFolder(path)
    torn, at_end = is_torn(folder.metrics), folder.gap(newest_step(folder.checkpoints))
    inside = folder.gap(max((row["step"] for row in read_rows(folder.metrics)), default=0))
    if (torn or at_end != inside) and owner_of(path):
        torn, at_end = False, inside
    if torn:
        yield (
            "metrics.jsonl ends in the middle of a line, and no launch is writing it: its writer was killed, or had no "
            "room; a run that resumes drops that line"
        )
    if gap := at_end or inside:
        yield f"{gap}; the file was cut, or rows were removed: training is not affected, but charts have a gap"


def checkup(run: RecordedRun, found: Sequence[Finding], damage: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a report: how far the run is and what its files lack, then each finding with what it means
    and what helps."""
    of = "" if run.num_steps is None else f" of {run.num_steps}"
    yield f"{escaped(run.name)}: step {History(run.rows).last_step}{of}"
    for sentence in damage:
        yield f"warning: {sentence}"
    if not found and not damage:
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
