"""The tables of the documentation follow from result files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import bench
import check
import rows

SEEN = "| a sum | 0.500 s | 1.000 s, abacus 2 | 0.50 | 0.40 to 0.60 | 0.4 missed | Abacus 9000 | 2026-01-02 | 0123456 |"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one benchmark, its result, and pages that show it."""
    sums = rows.Benchmark(about="a sum", goal=0.4, measure=lambda _: pytest.fail("it measures"), in_readme=True)
    stall = rows.Benchmark(about="a wait", measure=sums.measure)
    monkeypatch.setattr(check, "BENCHMARKS", {"sums": sums, "wait": stall})
    for name in ("docs", "benchmarks/results"):
        (tmp_path / name).mkdir(parents=True)
    for page in ("README.md", "docs/benchmarks.md"):
        (tmp_path / page).write_text(f"before\n\n{check.START}{check.END}\n\nafter\n")
    write_result(tmp_path)
    assert run(tmp_path, "--write") == 0
    assert run(tmp_path) == 0
    return tmp_path


def write_result(root: Path, *, name: str = "sums", **changes: Any) -> None:
    """A result file."""
    result = {
        "date": "2026-01-02",
        "commit": "0123456789abcdef",
        "machine": {"cpu": "Abacus(R) 9000 8-Core Processor @ 2.00GHz"},
        "peer": "abacus 2",
        "unit": "s",
        "spmdrl_median": 0.5,
        "peer_median": 1.0,
        "ratio": 0.5,
        "ratios": [0.6, 0.4, 0.5],
    }
    (root / f"benchmarks/results/{name}.json").write_text(json.dumps(result | changes))


def run(root: Path, *options: str) -> int:
    return check.main([*options, "--root", str(root)])


def lines(root: Path, page: str = "README.md") -> list[str]:
    return (root / page).read_text().splitlines()


def test_a_result_is_shown_with_its_goal_and_its_origin(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SEEN in lines(root)
    assert SEEN.replace("a sum", "a sum (`sums`)") in lines(root, "docs/benchmarks.md")
    assert [line for line in lines(root) if not line.startswith("|")] == [
        *("before", "", check.START.strip(), check.END, "", "after")
    ]
    run(root)
    assert capsys.readouterr().out.splitlines()[-1] == "not measured yet: wait"


def test_a_page_that_shows_something_else_is_found(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = root / "docs/benchmarks.md"
    page.write_text(page.read_text().replace("0.50 |", "0.05 |"))
    assert run(root) == 1
    said = capsys.readouterr().out
    assert "docs/benchmarks.md does not show" in said
    assert "README.md does not" not in said


def test_a_new_result_changes_the_pages(root: Path) -> None:
    changes = {"unit": "MiB", "spmdrl_median": 31.4, "peer_median": 11802.0, "ratio": 0.00266, "ratios": [0.00266]}
    write_result(root, commit="0123456789abcdef with changes", **changes)
    write_result(root, name="wait")
    assert run(root) == 1
    assert run(root, "--write") == 0
    cells = "31 MiB | 11,802 MiB, abacus 2 | 0.003 | one | 0.4 met | Abacus 9000 | 2026-01-02 | 0123456 with changes"
    assert f"| a sum | {cells} |" in lines(root)
    assert not [line for line in lines(root) if "a wait" in line], "the README leaves it out"
    assert [line for line in lines(root, "docs/benchmarks.md") if "a wait (`wait`)" in line]


def test_a_page_without_markers_is_refused(root: Path) -> None:
    (root / "README.md").write_text("no table\n")
    with pytest.raises(AssertionError, match=r"README.md has no place for the table"):
        run(root)


def test_the_readme_has_at_most_eight_rows() -> None:
    assert sum(benchmark.in_readme for benchmark in rows.BENCHMARKS.values()) <= 8


def test_short_measurements_do_not_replace_the_results_that_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", ["bench.py", "engine-fixed", "--steps", "1"]), pytest.raises(SystemExit) as end:
        bench.parse_arguments()
    assert end.value.code == 2
    assert "--steps measure less than the results that are kept; name another --results" in capsys.readouterr().err
    with mock.patch.object(sys, "argv", ["bench.py", "--steps", "1", "--results", "elsewhere"]):
        assert bench.parse_arguments().steps == 1
