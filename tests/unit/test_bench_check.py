"""The tables of the documentation follow from result files and from the code that they are about."""

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
import results
import rows

CODE = '''\
"""A docstring."""


class Adder:
    """Another."""

    def add(self, a, b):
        """A third."""
        return a + b  # a comment
'''
SAME_CODE = "class Adder:\n    def add(self, a, b):\n\n        return (a + b)\n"
OTHER_CODE = CODE.replace("a + b", "b + a")
SEEN = "| a sum | 0.500 s | 1.000 s, abacus 2 | 0.50 | 0.40 to 0.60 | Abacus 9000 | 2026-01-02 | 0123456 |"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one benchmark, its result, and pages that show it."""
    sums = rows.Benchmark(about="a sum", measure=lambda _: pytest.fail("it measures"), code=("ours/*.py",))
    stall = rows.Benchmark(about="a wait", measure=sums.measure, code=("ours/*.py",), in_readme=False)
    monkeypatch.setattr(check, "BENCHMARKS", {"sums": sums, "wait": stall})
    monkeypatch.setattr(check, "OTHERS", {})
    for name in ("ours", "docs", "benchmarks/results"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "ours/adder.py").write_text(CODE)
    for page in ("README.md", "docs/benchmarks.md"):
        (tmp_path / page).write_text(f"before\n\n{check.START}{check.END}\n\nafter\n")
    write_result(tmp_path)
    assert run(tmp_path, "--write") == 0
    assert run(tmp_path) == 0
    return tmp_path


def write_result(root: Path, *, name: str = "sums", **changes: Any) -> None:
    """A result of today's code."""
    result = {
        "date": "2026-01-02",
        "commit": "0123456789abcdef",
        "code_digest": results.code_digest(["ours/*.py"], root),
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


def test_a_fresh_result_is_shown_without_a_mark(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{SEEN}  |" in lines(root)
    assert f"{SEEN}  |".replace("a sum", "a sum (`sums`)") in lines(root, "docs/benchmarks.md")
    assert [line for line in lines(root) if not line.startswith("|")] == [
        *("before", "", check.START.strip(), check.END, "", "after")
    ]
    run(root)
    assert capsys.readouterr().out.splitlines()[-1] == "not measured yet: wait"


def test_only_what_python_reads_makes_a_result_stale(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "ours/adder.py").write_text(SAME_CODE)
    assert run(root) == 0
    assert "stale" not in capsys.readouterr().out
    (root / "ours/adder.py").write_text(OTHER_CODE)
    assert run(root) == 1
    said = capsys.readouterr().out
    assert "which it measured: sums\n" in said
    assert "README.md does not show what was measured: run `make bench-table`" in said
    assert run(root, "--write") == 0
    assert f"{SEEN} stale |" in lines(root)
    assert run(root) == 0, "that it is stale is no error"


def test_a_file_more_makes_a_result_stale(root: Path) -> None:
    (root / "ours/more.py").touch()
    assert run(root) == 1


def test_a_result_without_a_digest_is_stale(root: Path) -> None:
    write_result(root, code_digest=None)
    assert run(root, "--write") == 0
    assert f"{SEEN} stale |" in lines(root)


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
    cells = "31 MiB | 11,802 MiB, abacus 2 | 0.003 | one | Abacus 9000 | 2026-01-02 | 0123456 with changes"
    assert f"| a sum | {cells} |  |" in lines(root)
    assert not [line for line in lines(root) if "a wait" in line], "the README leaves it out"
    assert [line for line in lines(root, "docs/benchmarks.md") if "a wait (`wait`)" in line]


def test_places_without_files_or_markers_are_refused(root: Path) -> None:
    with pytest.raises(AssertionError, match=r"there is no file ours/gone.py"):
        results.code_digest(["ours/gone.py"], root)
    (root / "README.md").write_text("no table\n")
    with pytest.raises(AssertionError, match=r"README.md has no place for the table"):
        run(root)


def test_every_row_names_code_that_is_there() -> None:
    for code in (*(benchmark.code for benchmark in rows.BENCHMARKS.values()), *rows.OTHERS.values()):
        assert results.code_digest(code)


def test_short_measurements_do_not_replace_the_results_that_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(sys, "argv", ["bench.py", "engine-fixed", "--steps", "1"]), pytest.raises(SystemExit) as end:
        bench.parse_arguments()
    assert end.value.code == 2
    assert "--steps measure less than the results that are kept; name another --results" in capsys.readouterr().err
    with mock.patch.object(sys, "argv", ["bench.py", "--steps", "1", "--results", "elsewhere"]):
        assert bench.parse_arguments().steps == 1


def test_a_file_of_c_counts_but_for_its_comments(tmp_path: Path) -> None:
    source = tmp_path / "sum.c"
    digests = []
    for text in ("int a; // one\nint b;", "int a;\n\nint b; // two", "int a;\nint c;"):
        source.write_text(text)
        digests.append(results.code_digest(["*.c"], tmp_path))
    assert digests[0] == digests[1] != digests[2]
