"""Pictures of the documentation, drawn from recorded runs: `make pictures` puts them into docs/images."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from spmdrl.faults.files import FaultFiles
from spmdrl.faults.rank_status import read_statuses
from spmdrl.report.findings import checkup, findings
from spmdrl.report.run_folder import RecordedRun, read_run
from spmdrl.report.series import History
from spmdrl.tools.runs import Watcher, watch_page
from tests.helpers.recorded import SEEDS, as_if_running, beat

COLUMNS = 120


def as_svg(page: RenderableType, *, title: str) -> str:
    """Draw what a terminal would show."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(page)
    return console.export_svg(title=title, unique_id=title.split()[0])


def watch_picture(folder: Path) -> str:
    """A recorded run in the middle of a step; `folder` is for a copy."""
    run = as_if_running(folder)
    moved_at = read_statuses(FaultFiles(run))[0].moved_at
    beat(run, at=moved_at)
    return as_svg(watch_page(Watcher(run).read(now=moved_at + 2.0), width=COLUMNS), title="watch runs/demo")


def doctor_picture() -> str:
    """A recorded run with faults put into its rows."""
    run = faulty_run()
    lines = checkup(run, findings(History(run.rows)))
    return as_svg(Text("\n".join(lines)), title="doctor runs/demo")


def faulty_run() -> RecordedRun:
    """A recorded run whose rewards fail in two steps, and whose gradient spikes in one."""
    run = read_run(SEEDS[0])
    rows = [dict(row) for row in run.rows]
    rows[40]["update/grad_norm"] = 14.2
    rows[40]["reward/failed_count"], rows[41]["reward/failed_count"] = 3.0, 12.0
    return RecordedRun(name="demo", rows=rows, settings=run.settings, num_steps=run.num_steps)
