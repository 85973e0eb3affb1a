"""The files that the four trackers write offline, each by its own package: `make test-trackers` installs them.

Each has a folder of its own, because their requirements clash.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from spmdrl.report.files import read_rows
from spmdrl.report.sinks import POLL_S
from tests.helpers.tracker_files import set_sinks, write_rows

TRACKERS = Path(os.environ.get("TRACKERS", Path(sys.prefix, "trackers")))
ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, dict[str, Any]] = {
    "wandb": {"offline": True},
    "trackio": {},
    "mlflow": {},
    "swanlab": {"offline": True},
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_tracker_has_the_numbers_of_the_file_after_resumes_and_kills(kind: str, tmp_path: Path) -> None:
    if not (TRACKERS / kind).is_dir():
        pytest.skip(f"{kind} is not in {TRACKERS}; make test-trackers installs it")
    run = tmp_path / "run"
    run.mkdir()
    set_sinks(run, {kind: SETTINGS[kind] | {"project": "tests"}})
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "1 + 1 =", "response": "2"}) + "\n")
    (run / "curves.png").write_bytes((ROOT / "docs/images/compare.png").read_bytes())
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{TRACKERS / kind}",
        "TRACKIO_DIR": str(run / "sinks/trackio"),
        "WANDB_SILENT": "true",
    }

    def program(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout

    def found() -> dict[str, dict[int, dict[str, float | None]]]:
        said = program("-m", "tests.helpers.tracker_files", kind, str(run / "sinks")).splitlines()[-1]
        return {
            id: {int(step): {name: plain(value) for name, value in row.items()} for step, row in rows.items()}
            for id, rows in json.loads(said).items()
        }

    def rows() -> dict[int, dict[str, float | None]]:
        return {row.pop("step"): row for row in read_rows(run / "metrics.jsonl")}

    sync = ("-m", "spmdrl.tools.command", "sync", str(run))
    write_rows(run, range(5), start_step=-1)
    program(*sync)
    ((first, values),) = found().items()
    assert values == rows()
    write_rows(run, range(5, 9), start_step=4)
    program(*sync)  # the same run goes on
    assert found() == {first: rows()}
    write_rows(run, range(7, 10), start_step=6, shift=0.5)  # killed, and resumed at step 6
    assert "all steps go to a new run" in program(*sync)
    ((second, values),) = found().items()
    assert second != first and values == rows()
    # The node dies with the run and the process that sends: then a run resumes at step 8, and another is preempted.
    following = ("-m", "tests.helpers.tracker_files", "report", str(run))
    before = (run / "sinks" / f"{kind}.json").read_text()
    trainer = subprocess.Popen(
        [sys.executable, *following, "8", "13", "0.25", "stays"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None and any(line == "ready\n" for line in trainer.stdout)
    while (run / "sinks" / f"{kind}.json").read_text() == before:
        time.sleep(0.1)
    time.sleep(2 * POLL_S)  # for some of its rows
    for process in [*psutil.Process(trainer.pid).children(recursive=True), trainer]:
        process.kill()
    trainer.wait()
    program(*following, "10", "16", "0.75")
    ((third, values),) = found().items()
    assert third not in (first, second) and values == rows() and max(values) == 15
    program(*following, "15", "18", "0.75")  # what ended in order goes on
    assert found() == {third: rows()} and max(rows()) == 17


def plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
