"""Sinks: what a tracker has got is what metrics.jsonl says, also after kills and resumes; its failures cost a line."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spmdrl.config.run import FunctionSinkConfig, SinksConfig
from spmdrl.report import sinks as module
from spmdrl.report.files import read_rows
from spmdrl.report.sinks import Sender, SinkFailed, SinkProcesses, sink_problems, sinks_of, sync
from spmdrl.tools import runs
from spmdrl.types import UserError
from tests.helpers.tracker_files import report, set_sinks, write_rows

LOG = """
import json, os, time

def log(step, metrics, run, path):
    with open(path, "a") as file:
        file.write(json.dumps([run, step, metrics]) + "\\n")

def broken(step, metrics):
    if step == 2:
        raise ConnectionError("nobody answers")

def stuck(step, metrics):
    time.sleep(3600)
"""

Got = dict[str, dict[int, dict[str, float]]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder without rows, whose configuration names a function that writes what it gets to `got`."""
    (tmp_path / "log.py").write_text(LOG)
    folder = tmp_path / "run"
    folder.mkdir()
    set_sinks(folder, {"function": {"name": f"{tmp_path}/log.py:log", "params": {"path": str(tmp_path / "got")}}})
    return folder


def send(run: Path) -> list[str]:
    sinks, settings = sinks_of(run)
    return sync(run, "function", sinks["function"], settings, until=lambda sender: sender.send())


def got(run: Path) -> Got:
    """The numbers that the function got, by run and step. Nothing may come twice."""
    found: Got = defaultdict(lambda: defaultdict(dict))
    for line in (run.parent / "got").read_text().splitlines():
        name, step, metrics = json.loads(line)
        assert not found[name][step].keys() & metrics.keys()
        found[name][step] |= metrics
    return found


def same(found: Mapping[int, Mapping[str, float]], run: Path) -> bool:
    """Compare with metrics.jsonl, where what is not finite is null."""
    rows = {row.pop("step"): row for row in read_rows(run / "metrics.jsonl")}
    plain = {
        step: {name: value if math.isfinite(value) else None for name, value in values.items()}
        for step, values in found.items()
    }
    return plain == rows


def test_each_number_is_sent_once_and_is_that_of_the_file(run: Path) -> None:
    write_rows(run, [0, 1, 2], start_step=-1)
    assert send(run) == []
    assert send(run) == []  # there is nothing new
    write_rows(run, range(3, 200), start_step=2)
    assert send(run) == []
    ((_, found),) = got(run).items()
    assert same(found, run)


def test_steps_that_are_computed_again_go_to_a_new_run(run: Path) -> None:
    write_rows(run, range(1, 8), start_step=-1)
    send(run)
    write_rows(run, [5, 6, 7, 8], start_step=4, shift=0.5)  # resumed at step 4
    (said,) = send(run)
    (first, _), (second, found) = got(run).items()
    assert same(found, run)
    assert said.endswith(f"all steps go to a new run; delete {first} there") and second != first


def test_a_sink_that_was_not_closed_begins_anew(run: Path) -> None:
    write_rows(run, range(1, 8), start_step=-1)
    sinks, settings = sinks_of(run)
    sender = Sender(run, "function", sinks["function"], settings)
    sender.start()
    sender.send()
    with pytest.raises(UserError, match="another process sends"):
        Sender(run, "function", sinks["function"], settings)
    sender.close()
    (said,) = send(run)
    assert "is not known" in said and same([*got(run).values()][-1], run)


def test_a_sink_of_another_form_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_sinks(run, {"wandb": {"ofline": True}})
    assert runs.sync([str(run)]) == 2
    assert "config.toml: report.sinks.wandb.ofline: extra inputs are not permitted" in capsys.readouterr().err


def test_names_are_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 3)
    write_rows(run, [1, 2], start_step=-1)
    assert send(run) == ["1 scalars were left out: a sink gets 3 names"]


def test_a_function_that_raises_costs_a_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_sinks(run, {"function": {"name": f"{run.parent}/log.py:broken"}})
    write_rows(run, [1, 2], start_step=-1)
    with pytest.raises(SinkFailed, match=r"^ConnectionError: nobody answers; `spmdrl sync .*run` tries again$"):
        send(run)
    assert runs.sync([str(run)]) == 2
    assert "function: ConnectionError: nobody answers" in capsys.readouterr().err


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "log.py").write_text(LOG)
    bad = FunctionSinkConfig(name=f"{tmp_path}/log.py:log", params={"where": "x"})
    assert [*sink_problems({"function": bad})] == [
        f'report.sinks.function.name = "{tmp_path}/log.py:log": log asks for path, which is neither a column nor in '
        "params; columns are step, metrics, run",
        f'report.sinks.function.name = "{tmp_path}/log.py:log": params has where, but log takes no such argument',
    ]
    (missing,) = sink_problems({"no_tracker": SinksConfig.model_validate({"wandb": {}}).by_kind["wandb"]})
    assert missing.startswith("report.sinks.no_tracker is set, but no_tracker is not installed: pip install")


def test_a_run_sends_while_it_runs_and_flushes_at_its_end(run: Path) -> None:
    with report(run) as one:
        for step in (1, 2, 3):
            one.step(step, {"reward/mean": step / 7}, samples=[], histograms={})
            one.eval(step, {"eval/accuracy": step / 11})
    ((_, found),) = got(run).items()
    assert same(found, run)


def test_a_sink_that_hangs_is_left_behind(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", -4.0)
    set_sinks(run, {"function": {"name": f"{run.parent}/log.py:stuck"}})
    with report(run) as one:
        one.step(1, {"reward/mean": 0.5}, samples=[], histograms={})
        (process,) = one._sinks._processes.values()  # type: ignore[union-attr]
    assert process.returncode == -signal.SIGKILL
    assert f"not all was sent in time; `spmdrl sync {run}` sends the rest" in capsys.readouterr().out.replace("\n", " ")


FOLLOW = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from tests.helpers.tracker_files import report
one = report(Path({run!r}))
for step in (1, 2, 3):
    one.step(step, {{"reward/mean": step / 7}}, samples=[], histograms={{}})
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_the_sink_has_its_rows(run: Path) -> None:
    script = FOLLOW.format(here=str(Path(__file__).parents[2]), run=str(run))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        while trainer.stdout.readline() != "ready\n":
            pass
        trainer.kill()
    until(lambda: json.loads((run / "sinks/function.json").read_text())["is_closed"])
    ((_, found),) = got(run).items()
    assert same(found, run)


def until(condition: Any) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            if condition():
                return
        except OSError:
            pass
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_process_that_cannot_be_started_costs_a_sentence_and_is_not_tried_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", fails)
    processes = SinkProcesses(run, ["function"])
    (said,) = processes.see()
    assert said.startswith("report.sinks.function: its process cannot be started (Cannot allocate memory); afterwards")
    assert processes.see() == processes.close() == []
