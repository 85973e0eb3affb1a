"""spmdrl compare: seeds make a band, settings make lines, and final values are those of the rows."""

from __future__ import annotations

import json
import math
import statistics
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from spmdrl.report.comparison import FINAL_STEPS, compare
from spmdrl.report.curves import chart_as_svg
from spmdrl.report.files import read_rows
from spmdrl.report.run_folder import RecordedRun, read_run
from spmdrl.report.series import GROUPS, History, Series, band, smoothed
from spmdrl.tools import runs
from tests.helpers.recorded import SEEDS, SLOW

HOSTILE = "</svg><script>alert(1)</script>\u202e"


def made_up(name: str, rows: list[dict[str, float]], **settings: object) -> RecordedRun:
    return RecordedRun(name=name, rows=rows, settings={"run.name": name, "optim.lr": 1.0} | settings, num_steps=None)


def test_runs_that_differ_by_their_seed_alone_are_one_line() -> None:
    compared = compare([read_run(path) for path in (*SEEDS, SLOW)])
    assert [(line.label, [run.name for run in line.runs]) for line in compared.lines] == [
        ("optim.lr = 0.0005", ["demo-1", "demo-2"]),
        ("optim.lr = 5e-05", ["slow-1"]),
    ]
    assert compared.differences == {"optim.lr": ("0.0005", "5e-05")}


def test_runs_of_the_same_seed_are_lines_of_their_own() -> None:
    rows = [{"step": 1.0, "reward/mean": 0.5}]
    runs = [made_up(name, rows, **{"run.seed": seed}) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert [line.label for line in compare(runs).lines] == ["a, c", "b"]


def test_a_band_is_from_the_lowest_to_the_highest_at_steps_that_all_have() -> None:
    one = Series(np.arange(1, 6), np.array([1.0, 2.0, math.nan, 4.0, 5.0]))
    two = Series(np.arange(2, 9), np.arange(2.0, 9.0) * 2)
    seeds = band([one, two])
    assert seeds.steps.tolist() == [2, 4, 5]
    assert seeds.lows.tolist() == [2.0, 4.0, 5.0] and seeds.highs.tolist() == [4.0, 8.0, 10.0]
    assert seeds.means.tolist() == [3.0, 6.0, 7.5]
    alone = band([two])
    np.testing.assert_array_equal(alone.means, smoothed(two.values))
    np.testing.assert_array_equal(alone.lows, alone.highs)
    assert len(band([]).steps) == len(band([one, Series(np.array([99]), np.array([1.0]))]).steps) == 0


def test_final_values_are_means_over_the_last_steps_and_over_runs() -> None:
    line = compare([read_run(path) for path in SEEDS]).lines[0]
    ends = [
        statistics.fmean(row["reward/mean"] for row in read_rows(path / "metrics.jsonl")[-FINAL_STEPS:])
        for path in SEEDS
    ]
    final = line.final("reward/mean")
    assert final is not None
    assert final.mean == pytest.approx(statistics.fmean(ends))
    assert final.deviation == pytest.approx(statistics.stdev(ends))
    accuracy = line.final("eval/accuracy")  # the last evaluation came before the last ten steps
    assert accuracy is not None and accuracy.mean == statistics.fmean(
        [row["eval/accuracy"] for row in read_rows(path / "metrics.jsonl") if "eval/accuracy" in row][-1]
        for path in SEEDS
    )
    assert line.final("no/such") is None
    assert compare([made_up("one", [{"step": 1, "a/b": 2.0}])]).lines[0].final("a/b").deviation is None  # type: ignore[union-attr]


def test_lines_are_named_by_their_runs_where_several_settings_differ() -> None:
    rows = [{"step": 1, "reward/mean": 1.0}]
    compared = compare([made_up("a", rows), made_up("b", rows, **{"optim.lr": 2.0, "loss.kl_coef": 0.1})])
    assert [line.label for line in compared.lines] == ["a", "b"]
    assert compared.differences == {"optim.lr": ("1.0", "2.0"), "loss.kl_coef": ("unset", "0.1")}


class Text(HTMLParser):
    """The texts of a page, and its tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)


def test_the_page_has_a_picture_of_each_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "compare.html"
    assert runs.compare([*map(str, (*SEEDS, SLOW)), "--output", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    page = Text(out.read_text())
    assert page.tags.count("img") == page.tags.count("figure") >= 12
    assert "demo-1 (seed 1), demo-2 (seed 2)" in page.texts and "optim.lr" in page.texts
    assert "script" not in page.tags and "link" not in page.tags


def test_names_and_values_of_others_are_texts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 1.0}\n')
    (run / "config.toml").write_text(f"[run]\nname = 'x'\n[data]\nsystem_prompt = {json.dumps(HOSTILE)}\n")
    out = tmp_path / "compare.html"
    assert runs.compare([str(run), str(SLOW), "--output", str(out)]) == 0
    page = Text(out.read_text())
    assert "script" not in page.tags
    assert any("</script>" in text for text in page.texts) and "\u202e" not in out.read_text()


def test_a_picture_is_a_png(tmp_path: Path) -> None:
    out = tmp_path / "compare.png"
    assert runs.compare([*map(str, (*SEEDS, SLOW)), "--output", str(out)]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG" and out.stat().st_size > 50_000


@pytest.mark.parametrize(
    ("folders", "output", "sentence"),
    [
        (["nothing"], "c.html", "is not the folder of a run"),
        (["empty"], "c.html", "has no finished step to show"),
        ([str(SLOW)], "no/such/folder/c.html", "name a file in a folder that is there: --output"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(
    folders: list[str], output: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/metrics.jsonl").touch()
    paths = [run if run.startswith("/") else str(tmp_path / run) for run in folders]
    assert runs.compare([*paths, "--output", str(tmp_path / output)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("cannot compare: ") and sentence in told and told.count("\n") == 1


def test_every_chart_has_a_title_and_a_scalar_of_its_own() -> None:
    charts = [chart for group in GROUPS.values() for chart in group]
    names = [name for chart in charts for name in chart.names]
    assert len({chart.title for chart in charts}) == len(charts) and len(set(names)) == len(names)


def test_a_value_at_the_end_of_what_a_float_can_be_is_drawn() -> None:
    drawn = band([History([{"step": 1, "reward/mean": 1.7e308}])["reward/mean"]])
    assert chart_as_svg([("run", drawn)]).count(b"<svg") == 1
