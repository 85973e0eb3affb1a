"""Report: the files hold what was given, and a run that was killed and resumed leaves the files of one that was not."""

from __future__ import annotations

import io
import json
import math
import re
import struct
import time
import tomllib
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from spmdrl.config import Config, ReportConfig
from spmdrl.faults.files import FaultFiles, PathIn
from spmdrl.memory.phase import PhaseMemory
from spmdrl.report import Report, RunFolder
from spmdrl.report import tensorboard as tensorboard_page
from spmdrl.report.console import (
    LiveDisplay,
    PlainLines,
    Progress,
    format_duration,
    format_number,
    phase_times,
    sparkline,
)
from spmdrl.report.curves import PHASE_COLORS, figure_of
from spmdrl.report.files import StepRowsFile, cut_after, missing_steps, read_rows
from spmdrl.report.memory import restart_host_peak
from spmdrl.report.report import resource_metrics
from spmdrl.report.samples import sample_rows
from spmdrl.report.series import GROUPS, smoothed
from spmdrl.tools import runs
from spmdrl.types import RewardedRollout, Rollout, UserError
from tests.helpers.rollouts import (
    END,
    HOSTILE,
    byte_tokenizer,
    chat_prompt,
    one_turn,
    recorded_episodes,
    response_of,
)

NUM_STEPS = 8
EVERYTHING = {"compressedHistograms": 0, "histograms": 0, "scalars": 0, "tensors": 0, "images": 0, "audio": 0}


@dataclass(frozen=True)
class TinyPlan:
    """Stands for the run's plan."""

    num_steps: int
    held: tuple[int, ...]


def scalars_of(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 10,
        "rollout/response_tokens": 40.0 - step,
        "update/entropy_nats": 2.0 / step,
        "mismatch/max_abs_nats": 1e-6 * step,
        "update/grad_norm": math.sqrt(step),
        "time/rollout_s": 0.2,
        "time/update_s": 0.1,
    }


def samples_of(step: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{step}+{number}=", "response": str(step + number), "reward": 1.0} for number in range(3)]


def report_steps(folder: RunFolder, steps: range, *, start_step: int | None = None) -> Report:
    """Report these steps as a training loop would, with an evaluation before the first and after every other one."""
    cfg = ReportConfig(console="plain")
    report = Report(cfg, folder, num_steps=NUM_STEPS, active=True, start_step=start_step)
    if start_step is None:
        report.eval(0, {"eval/accuracy": 0.0})
    for step in steps:
        if step % 2 == 0:
            report.eval(step, {"eval/accuracy": step / 8})
        histograms = {"reward/mean": [0.0, 1.0, step / 8]}
        report.step(step, scalars_of(step), samples=samples_of(step), histograms=histograms)
    return report


def read_events(folder: RunFolder) -> EventAccumulator:
    return EventAccumulator(str(folder.tensorboard), size_guidance=EVERYTHING).Reload()


def read_scalars(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    events = read_events(folder)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.of(tmp_path, "run", "auto").create()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was never stopped; only read."""
    folder = RunFolder.of(tmp_path_factory.mktemp("runs"), "whole", "auto").create()
    report_steps(folder, range(1, NUM_STEPS + 1)).close()
    return folder


def test_files_hold_what_was_given(whole: RunFolder) -> None:
    evaluated = {step: {"eval/accuracy": step / 8} for step in range(0, NUM_STEPS + 1, 2)}
    assert read_rows(whole.metrics) == [
        {"step": step} | (evaluated.get(step, {})) | (scalars_of(step) if step else {}) for step in range(NUM_STEPS + 1)
    ]
    assert read_rows(whole.samples) == [
        {"step": step} | sample for step in range(1, NUM_STEPS + 1) for sample in samples_of(step)
    ]


def test_tensorboard_holds_the_same_numbers_as_metrics_jsonl(whole: RunFolder) -> None:
    expected: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows(whole.metrics):
        for name, value in row.items():
            if name != "step":
                expected.setdefault(name, []).append((row["step"], float(np.float32(value))))
    assert read_scalars(whole) == expected


def test_tensorboards_first_page_has_every_chart_and_draws_what_was_measured(whole: RunFolder) -> None:
    (event,) = read_events(whole).Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for group in layout.category for chart in group.chart}
    assert {group.title for group in layout.category} == {*GROUPS, "Time"}
    drawn = {
        title: [name for name in read_scalars(whole) if any(re.fullmatch(tag, name) for tag in tags)]
        for title, tags in charts.items()
    }
    assert drawn["reward"] == ["reward/mean"] and drawn["accuracy, held out"] == ["eval/accuracy"]
    assert drawn["time of each phase, s"] == ["time/rollout_s", "time/update_s"]


def test_tensorboards_own_server_shows_every_scalar_of_the_file(whole: RunFolder) -> None:
    """An event reader would not do: the server shows no scalar whose tag is a histogram's too."""
    try:
        from tensorboard.program import TensorBoard
    except ImportError as error:  # the oldest version's server needs a package that setuptools no longer has
        pytest.skip(str(error))
    server = TensorBoard()
    folder = str(whole.tensorboard)
    server.configure(argv=["", "--logdir", folder, "--load_fast=false", "--host", "127.0.0.1", "--port", "0"])
    url = server.launch() + "data/plugin/"

    def asked(path: str) -> Any:
        with urllib.request.urlopen(url + path) as answer:
            return json.load(answer)

    rows = read_rows(whole.metrics)
    names = {name for row in rows for name in row} - {"step"}
    while not (tags := asked("scalars/tags").get(".", {})):
        time.sleep(0.1)
    assert names <= tags.keys()
    (pattern,) = tensorboard_page.LAYOUT["Outcome"]["reward"][1]
    shown = asked(f"custom_scalars/scalars?run=.&tag={urllib.parse.quote(pattern)}")["tag_to_events"]["reward/mean"]
    assert [step for _, step, _ in shown] == [row["step"] for row in rows if "reward/mean" in row]


def test_tensorboard_holds_histograms_and_samples(whole: RunFolder) -> None:
    events = read_events(whole)
    for event in events.Histograms("distribution/reward/mean"):
        given = [0.0, 1.0, event.step / 8]
        histogram = event.histogram_value
        assert (histogram.num, histogram.sum, histogram.max) == (3, sum(given), 1.0)
    texts = events.Tensors("samples/text_summary")
    assert [text.step for text in texts] == list(range(1, NUM_STEPS + 1))
    assert "3+1=" in texts[2].tensor_proto.string_val[0].decode()


@pytest.mark.parametrize("resumed_from", [None, 0, 3, 5])
def test_killed_and_resumed_equals_never_stopped(
    folder: RunFolder, whole: RunFolder, resumed_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Report, "_write_curves", lambda *_: "no curves")  # a second for each picture
    killed = report_steps(folder, range(1, 6))  # never closed: the process was killed
    with folder.metrics.open("a") as metrics:
        metrics.write('{"step": 6, "reward/me')  # in the middle of a line
    for events in folder.tensorboard.iterdir():
        # TensorBoard reads files in the order of their names, which begin with the second they were made in.
        events.rename(events.with_name(events.name.replace("tfevents.", "tfevents.0")))
    report_steps(folder, range((resumed_from or 0) + 1, NUM_STEPS + 1), start_step=resumed_from).close()

    assert folder.metrics.read_bytes() == whole.metrics.read_bytes()
    assert folder.samples.read_bytes() == whole.samples.read_bytes()
    assert read_scalars(folder) == read_scalars(whole)
    killed.close()


def test_an_evaluation_joins_the_row_of_its_step_whichever_comes_first(tmp_path: Path) -> None:
    rows = []
    for name, eval_first in (("before", True), ("after", False)):
        folder = RunFolder.of(tmp_path, name, "auto").create()
        with Report(ReportConfig(console="plain"), folder, num_steps=1, active=True) as report:
            calls = [
                lambda report=report: report.eval(1, {"eval/accuracy": 0.5}),
                lambda report=report: report.step(1, {"reward/mean": 0.25}, samples=[], histograms={}),
            ]
            for call in calls if eval_first else calls[::-1]:
                call()
        rows.append(read_rows(folder.metrics))
    assert rows[0] == rows[1] == [{"step": 1, "eval/accuracy": 0.5, "reward/mean": 0.25}]


def test_an_evaluation_of_the_step_it_was_resumed_from_joins_that_row(folder: RunFolder) -> None:
    report_steps(folder, range(1, 4)).close()
    report = report_steps(folder, range(0), start_step=3)
    report.eval(3, {"eval/accuracy": 0.75})
    report.close()
    assert read_rows(folder.metrics)[-1] == {"step": 3} | scalars_of(3) | {"eval/accuracy": 0.75}
    assert [row["step"] for row in read_rows(folder.metrics)] == [0, 1, 2, 3]


def test_answers_of_an_evaluation_are_rows_of_their_step_and_repeated_ones_replace_them(folder: RunFolder) -> None:
    for start_step in (None, 0):
        with Report(ReportConfig(console="plain"), folder, num_steps=2, active=True, start_step=start_step) as report:
            if start_step is None:
                report.eval(0, {"eval/accuracy": 0.5}, samples=samples_of(0))
            report.eval(1, {"eval/accuracy": 0.5}, samples=samples_of(1))
    expected = [{"step": step} | sample for step in (0, 1) for sample in samples_of(step)]
    assert read_rows(folder.eval_samples) == expected and not folder.samples.exists()


def test_a_number_that_is_not_finite_is_null(folder: RunFolder) -> None:
    with Report(ReportConfig(console="plain"), folder, num_steps=1, active=True) as report:
        scalars = {"update/loss": math.nan, "update/ratio": math.inf, "reward/mean": 1.0}
        report.step(1, scalars, samples=[{"reward": math.nan}], histograms={"reward/mean": [math.nan, 1.0], "none": []})
    assert read_rows(folder.metrics) == [{"step": 1, "update/loss": None, "update/ratio": None, "reward/mean": 1.0}]
    assert read_rows(folder.samples) == [{"step": 1, "reward": None}]
    assert read_events(folder).Histograms("distribution/reward/mean")[0].histogram_value.num == 1


def test_any_text_survives_in_samples(folder: RunFolder) -> None:
    sample = {"prompt": "两个\u2028\r\n```\x00", "response": "\ud83d", "metadata": {"parts": (1, 2.5, None)}}
    with Report(ReportConfig(console="plain"), folder, num_steps=1, active=True) as report:
        report.step(1, {"reward/mean": 1.0}, samples=[sample], histograms={})
    assert read_rows(folder.samples) == [{"step": 1} | sample | {"metadata": {"parts": [1, 2.5, None]}}]


def test_a_broken_line_in_the_middle_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"line 2 is not valid JSON"):
        cut_after(path, 3)


def test_steps_without_a_row_are_those_after_the_first_row() -> None:
    def rows(*steps: int) -> list[dict[str, Any]]:
        return [{"step": step} for step in steps]

    assert missing_steps(rows(0, 1, 2), 2) == missing_steps(rows(), 0) == missing_steps(rows(0), 0) == []
    assert missing_steps(rows(11, 12), 12) == []  # it began with the checkpoint of another run
    assert missing_steps(rows(1, 2, 5), 8) == [3, 4, 6, 7, 8] and missing_steps(rows(), 2) == [1, 2]


def test_samples_of_two_files_are_those_of_one(tmp_path: Path) -> None:
    for name, cuts in (("one", [range(1, 5)]), ("two", [range(1, 4), range(3, 5)])):
        for steps in cuts:
            file = StepRowsFile(tmp_path / name, start_step=steps[0] - 1)
            for step in steps:
                file.write(step, samples_of(step))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_inactive_report_writes_nothing_but_measures(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.path.rglob("*"))
    with Report(ReportConfig(), folder, num_steps=1, active=False) as report:
        with report.span("rollout"):
            pass
        report.eval(0, {"eval/accuracy": 0.0})
        report.step(1, scalars_of(1), samples=samples_of(1), histograms={"reward/mean": [1.0]})
        report.message("not for this rank")
        assert report.take_times().keys() == {"time/rollout_s", "time/step_s"}
    assert sorted(folder.path.rglob("*")) == before
    assert capsys.readouterr().out == ""


def test_times_add_up_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0, 10.5, 20.0, 24.0, 30.0, 31.0])
    monkeypatch.setattr("spmdrl.report.report.time.perf_counter", lambda: next(clock))
    report = Report(ReportConfig(), None, num_steps=1, active=False)
    for name in ("rollout", "update", "rollout"):
        with report.span(name):
            pass
    assert report.take_times() == {"time/rollout_s": 6.0, "time/update_s": 0.5, "time/step_s": 30.0}
    assert report.take_times() == {"time/step_s": 1.0}


def test_without_a_folder_it_only_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Report(ReportConfig(console="plain"), None, num_steps=1, active=True) as report:
        report.step(1, scalars_of(1), samples=samples_of(1), histograms={})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 1/1  reward 0.100  tokens 39.0")
    assert lines[1].startswith("step 1 of 1 in ")


def test_a_resumed_run_prints_a_line_per_remaining_step(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    report_steps(folder, range(1, 6)).close()
    capsys.readouterr()
    report = report_steps(folder, range(6, 8), start_step=5)
    report.message("a word [in] between")
    report.close()
    report.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [
        "eval after step 6",
        "step 6/8",
        "step 7/8",
        "a word [in] between",
    ]
    # From the first step of the first launch to the last step of this one.
    assert "step 7 of 8" in lines[-1]
    assert "reward 0.100 -> 0.700; eval accuracy 0 -> 0.750" in lines[-1]


def test_a_failed_run_still_gets_its_curves_and_its_last_line(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError, match="diverged"), report_steps(folder, range(1, 3)):
        raise RuntimeError("diverged")
    assert folder.curves.exists()


def test_a_disk_without_room_for_curves_does_not_hide_what_stopped_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> str:
        raise OSError("No space left on device")

    monkeypatch.setattr(Report, "_write_curves", no_room)
    with pytest.raises(RuntimeError, match="diverged"), report_steps(folder, range(1, 3)):
        raise RuntimeError("diverged")
    with pytest.raises(OSError, match="No space"), report_steps(folder, range(1, 3)):
        pass


def test_the_time_left_is_that_of_the_steps_of_this_launch() -> None:
    now = [100.0]
    progress = Progress(num_steps=200, start_step=40, rows=[], clock=lambda: now[0])
    assert progress.left_s() is None
    for step in (41, 42):
        now[0] += 3.0
        progress.end_step(step, scalars_of(step))
    assert progress.left_s() == 3.0 * (200 - 42)
    now[0] += 1.0
    assert progress.left_s() == 3.0 * (200 - 42) - 1.0


def test_live_display_shows_where_a_resumed_run_is() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None, legacy_windows=False)
    rows = [{"step": step} | scalars_of(step) for step in range(1, 41)]
    display = LiveDisplay(Progress(num_steps=200, start_step=40, rows=rows), title="demo", console=console)
    display.begin_phase("rollout")
    display.message("a word [in] between")
    display.end_step(41, scalars_of(41))
    display.close()
    shown = screen.getvalue()
    assert "a word [in] between" in shown
    last = shown[shown.rindex("demo") :]
    assert "step 41/200" in last
    assert " 0.100 " in last and " 4.10 " in last  # the reward of step 1 and of step 41
    assert "rollout" in last and "update" in last
    assert "\x1b[?25h" in shown  # the cursor is back


def test_one_evaluation_is_no_progress() -> None:
    progress = Progress(num_steps=1, start_step=0, clock=lambda: 0.0)
    progress.end_eval({"eval/accuracy": 0.0625})
    assert progress.summary() == "step 0 of 1 in 0:00; eval accuracy 0.062"
    progress.end_eval({"eval/accuracy": 0.0625})
    assert progress.summary().endswith("eval accuracy 0.062 -> 0.062")


@pytest.mark.parametrize(("tasks", "told"), [(["sums"], []), (["sums", "words"], ["sums", "words"])])
def test_the_accuracy_of_the_only_task_is_not_said_again(tasks: list[str], told: list[str]) -> None:
    stream = io.StringIO()
    scalars = {"eval/accuracy": 0.5} | {f"eval/accuracy_{task}": 0.5 for task in tasks}
    PlainLines(Progress(num_steps=1, start_step=0), stream).end_eval(0, scalars)
    assert [word for word in ("sums", "words") if word in stream.getvalue()] == told


def test_live_and_plain_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A number that has a place in the line has one in the table."""
    progress = Progress(num_steps=2, start_step=0)
    stream = io.StringIO()
    PlainLines(progress, stream).end_step(1, scalars_of(1) | {"update/loss": 0.5})
    line = stream.getvalue()
    for shown, values in progress.history():
        assert f"{shown.short} {format_number(values[-1])}" in line
    assert "loss" not in line  # there is a reward to look at


def test_numbers_and_durations_and_trends() -> None:
    numbers = (0.0, 0.5312, 1.666, 96.06, 145.4, 12_410.0, 2.5e6, 3.2e-6, -0.25, math.nan)
    assert [format_number(value) for value in numbers] == [
        *("0", "0.531", "1.67", "96.1", "145", "12.4k", "2.50M", "3.2e-06", "-0.250", "nan")
    ]
    assert [format_duration(value) for value in (None, math.inf, 0.0, 59.6, 3725.0)] == [
        "-:--",
        "-:--",
        "0:00",
        "1:00",
        "1:02:05",
    ]
    assert sparkline([0.0, 1.0, math.nan, 7.0], width=10) == "▁▂ █"
    assert len(sparkline([float(value) for value in range(1000)], width=40)) == 40
    assert sparkline([], width=40) == ""


def test_smoothing_keeps_a_constant_and_passes_over_nan() -> None:
    values = np.full(200, 3.0)
    values[50] = math.nan
    np.testing.assert_allclose(smoothed(values), 3.0)
    short = np.array([1.0, 5.0, 2.0])
    np.testing.assert_array_equal(smoothed(short), short)
    assert len(smoothed(np.array([]))) == 0


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:24])


def test_curves_are_a_png(whole: RunFolder) -> None:
    width, height = png_size(whole.curves)
    assert 1200 <= width <= 2400 and 500 <= height <= 1200
    assert whole.curves.stat().st_size > 20_000  # more than an empty sheet


def test_phases_have_colours_of_their_own_and_no_panel_is_empty(tmp_path: Path) -> None:
    assert len(set(PHASE_COLORS)) == len(PHASE_COLORS) >= 12
    tuned = {"tuned": [{"step": step, "update/loss": 1.0, "update/lr": 1e-3, "time/update_s": 1.0} for step in (1, 2)]}
    figure = figure_of(tuned)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["tuned", "learning rate", "time per step, s"]
    assert not [text for axes in figure.axes for text in axes.texts], "nothing says that it was not measured"


def test_plot_draws_several_runs_over_each_other(
    whole: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A run that has only begun, one whose numbers are null, and one that is still writing.
    texts = {
        "begun": '{"step": 0, "eval/accuracy": 0.5}\n',
        "null": '{"step": 1, "reward/mean": null, "time/update_s": 0.0}\n',
        "torn": '{"step": 1, "update/loss": 1.5}\n{"st',
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(text)
        runs.plot([str(tmp_path / name)])
        png_size(tmp_path / name / "curves.png")
    out = tmp_path / "all.png"
    runs.plot([str(whole.path), *(str(tmp_path / name) for name in texts), "--out", str(out)])
    assert png_size(out) == png_size(whole.curves)
    assert str(out) in capsys.readouterr().out

    assert runs.plot([str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_resume_never_refuses_a_folder_that_holds_a_run(whole: RunFolder) -> None:
    with pytest.raises(UserError, match=r'resume\.checkpoint = "never" but .*whole already holds a run; set run\.name'):
        RunFolder.of(whole.path.parent, whole.path.name, "never")
    assert RunFolder.of(whole.path.parent, whole.path.name, "auto") == whole


def test_resume_never_may_be_asked_by_every_rank_before_the_run_begins(tmp_path: Path) -> None:
    first = RunFolder.of(tmp_path, "run", "never").create()
    assert RunFolder.of(tmp_path, "run", "never").create() == first


def test_a_folder_that_cannot_be_made_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be created .*; set run\.dir to a writable directory"):
        RunFolder.of(tmp_path, "run", "auto").create()


@pytest.mark.parametrize(
    "name", [name for kind in (RunFolder, FaultFiles) for name in vars(kind) if isinstance(vars(kind)[name], PathIn)]
)
def test_every_file_of_a_run_must_be_its_own(name: str, tmp_path: Path) -> None:
    path = next(getattr(kind(tmp_path), name) for kind in (RunFolder, FaultFiles) if name in vars(kind))
    path.symlink_to("/dev/null")
    named = [problem for problem in RunFolder(tmp_path).problems() if problem.startswith(str(path))]
    assert len(named) == (name != "stop")  # which is the user's


def test_launch_files_read_back_as_what_was_launched(folder: RunFolder) -> None:
    cfg = Config.model_validate(
        {
            "run": {"name": "a-name", "dir": 'a "folder"\n', "num_steps": 3},
            "model": {"path": "tiny"},
            "data": {
                "sources": [
                    {"kind": "reasoning_gym", "task": "chain_sum", "params": {"min_terms": 2, "sizes": [1, 2]}},
                    {"kind": "jsonl", "path": "数据.jsonl"},
                ],
                "max_prompt_tokens": 16,
            },
            "rollout": {"prompts_per_step": 4, "group_size": 2, "max_response_tokens": 8},
            "reward": {"terms": [{"kind": "exact"}, {"kind": "math", "weight": 0.5}]},
            "optim": {"lr": 1e-6},
            "pack": {"max_tokens_per_micro_batch": 64},
        }
    )
    folder.write_launch(cfg, TinyPlan(num_steps=3, held=(1, 2)), {"processor": "any"})

    assert Config.model_validate(tomllib.loads(folder.config.read_text(encoding="utf-8"))) == cfg
    assert json.loads(folder.plan.read_text()) == {"num_steps": 3, "held": [1, 2]}
    versions = json.loads(folder.versions.read_text())
    assert versions["torch"] == torch.__version__
    assert versions.keys() >= {
        "python",
        "transformers",
        "spmdrl",
        "platform",
        "git_commit",
        "git_dirty",
        "cuda_devices",
    }


def test_git_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: RunFolder) -> None:
    from spmdrl.report.run_folder import describe_machine

    monkeypatch.setattr("spmdrl.__file__", str(tmp_path / "spmdrl/__init__.py"))
    (tmp_path / "spmdrl").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert (describe_machine()["git_commit"], describe_machine()["git_dirty"]) == (None, None)
    monkeypatch.setenv("PATH", "")
    assert describe_machine()["git_commit"] is None


def test_each_phase_is_compared_with_its_prediction_once_and_not_among_the_steps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    phases = [PhaseMemory(name, {}, {"process": 2**30}) for name in ("load", "rollout", "refit", "save")]
    with Report(ReportConfig(console="plain"), None, num_steps=2, active=True) as report:
        report.expect(phases)
        for step, span in enumerate(("rollout", "rollout", "save"), start=1):
            with report.span(span):
                torch.zeros(1)
            measured = {name: metric.value() for name, metric in resource_metrics(report.take_peaks()).items()}
            assert measured["memory/peak_gib"] >= measured[f"memory/{span}_peak_gib"] > 0
            report.step(step, scalars_of(step) | measured, samples=[], histograms={})
        report.compare({})
    shown = capsys.readouterr().out
    first, *_, last = (place for place, line in enumerate(shown.splitlines()) if re.match(r"step +\d+/", line))
    tables = [place for place, line in enumerate(shown.splitlines()) if line.startswith("peak memory")]
    assert len(tables) == 2 and tables[0] < first and last < tables[1] and last == first + 2
    assert "refit" not in shown
    assert shown.count("\n  rollout       1.00  ") == shown.count("\n  save        1.00  ") == 1


@pytest.mark.skipif(not restart_host_peak(), reason="this system keeps one peak for the whole process")
def test_the_peak_of_a_phase_is_its_own() -> None:
    size = 2**26
    with Report(ReportConfig(console="plain"), None, num_steps=1, active=False) as report:
        # What the allocator kept of earlier tests is resident, and goes back when such a phase begins.
        report.expect([PhaseMemory(name, {}, {"process": 2**30}) for name in ("update", "save", "export")])
        with report.span("update"):
            torch.zeros(size, dtype=torch.uint8).fill_(1)
        with report.span("save"):
            torch.zeros(1)
        kept = torch.ones(size, dtype=torch.uint8)
        with report.span("export"):
            del kept
        peaks = {name: peak.host_bytes for name, peak in report.take_peaks().items()}
    assert peaks["update"] - peaks["save"] > 0.9 * size
    assert peaks["export"] - peaks["save"] > 0.9 * size  # it holds `kept` when it begins


@pytest.mark.skipif(not restart_host_peak(), reason="this system keeps one peak for the whole process")
def test_what_an_earlier_phase_freed_is_not_measured_as_the_next_ones() -> None:
    block, count = 2**20, 64
    with Report(ReportConfig(console="plain"), None, num_steps=1, active=False) as report:
        report.expect([PhaseMemory("save", {}, {"process": 2**30})])
        torch.ones(block, dtype=torch.uint8)  # after one was freed, the allocator keeps blocks of this size
        with report.span("update"):
            blocks = [torch.ones(block, dtype=torch.uint8) for _ in range(count)]
            last = blocks.pop()  # while it lives the others stay in the allocator's reach
            del blocks
        with report.span("save"):
            last.add_(1)
        peaks = {name: peak.host_bytes for name, peak in report.take_peaks().items()}
    assert peaks["update"] - peaks["save"] > 0.8 * count * block


def row_of(rollout: Rollout) -> dict[str, Any]:
    """The rollout's row in samples.jsonl."""
    outcome = recorded_episodes(byte_tokenizer())[0][1]
    (row,) = sample_rows([RewardedRollout(index=0, rollout=rollout, outcome=outcome)], {0: 0.5}, byte_tokenizer())
    return row


def test_a_sample_without_an_environment_is_one_response() -> None:
    tokenizer = byte_tokenizer()
    row = row_of(one_turn(chat_prompt(tokenizer, "1 + 1?"), response_of(tokenizer, "2")))
    assert row["response"] == f"2{END}" and row["finish_reason"] == "stop" and row["version"] == 3
    assert not {"turns", "end", "trajectories", "environment_failure", "environment_reward"} & row.keys()


def test_a_sample_of_an_episode_is_a_conversation() -> None:
    (good, _), (masked, _), (forked, _), (broken, _) = recorded_episodes(byte_tokenizer())
    row = row_of(good)
    assert (row["end"], row["trajectories"], row["environment_reward"]) == ("done", 1, 1.0)
    first, second = row["turns"]
    assert first["read"] == good.prompt.text and "<tool_call>" in first["written"]
    assert first["tool_calls"] == [{"name": "lookup", "arguments": {"key": "Zürichsee"}}]
    assert (first["reward"], first["metrics"], first["tool_errors"], first["trained"]) == (
        0.0,
        {"lookups": 1.0},
        0,
        True,
    )
    assert "A lake.\tCity:  Zürich" in second["read"] and second["written"] == f"It is Zürich 🏔.{END}"
    assert second["tokens_written"] == len(good.responses[1].token_ids)
    assert [turn["trained"] for turn in row_of(masked)["turns"]] == [False, False]
    assert row_of(masked)["turns"][0]["tool_errors"] == 1
    assert row_of(forked)["trajectories"] == 2 and len(row_of(forked)["turns"]) == 2
    (turn,) = row_of(broken)["turns"]
    assert turn["reward"] is None and turn["metrics"] is None and "no JSON" in turn["malformed"]
    assert row_of(broken)["environment_failure"] == f"RuntimeError: {HOSTILE}"
    json.dumps(row)


def test_tensorboard_shows_an_episode_as_a_conversation_that_cannot_end_its_code(folder: RunFolder) -> None:
    row = row_of(recorded_episodes(byte_tokenizer())[0][0])
    (call,) = row["turns"][0]["tool_calls"]
    call["name"], call["arguments"] = "look`up`\n# Heading", {"key": "```\n# Heading"}
    row["turns"][1]["written"] = "````\n<b>"
    with Report(ReportConfig(console="plain"), folder, num_steps=1, active=True) as report:
        report.step(1, {"reward/mean": 1.0}, samples=[row], histograms={})
    (text,) = read_events(folder).Tensors("samples/text_summary")
    words = text.tensor_proto.string_val[0].decode()
    assert "#### Turn 1: 58 tokens read, 101 written, reward 0\n" in words
    assert "#### Turn 2: 43 tokens read, 20 written, reward 1\n" in words
    assert "**calls** `` look`up` # Heading ``" in words and "\n# Heading" not in words
    assert "**wrote**\n\n`````\n````\n<b>\n`````" in words
    assert "**metric** ` lookups ` 1" in words


def test_a_phase_whose_seconds_are_no_number_has_no_time() -> None:
    assert phase_times({"time/update_s": None, "time/refit_s": 2.0, "time/step_s": 3.0}) == {"refit": 2.0}
