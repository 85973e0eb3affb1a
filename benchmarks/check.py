"""Put the results into the documentation.

    python benchmarks/check.py            make bench-check: fails when a page shows something else
    python benchmarks/check.py --write    make bench-table: writes the pages

The tables between the markers on README.md and docs/benchmarks.md follow from benchmarks/results/. Each row says at
which commit and on which processor it was measured. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from results import ROOT, Json
from rows import BENCHMARKS, Benchmark, verdict

START, END = "<!-- bench-table: `make bench-table` writes it -->\n", "<!-- /bench-table -->"
HEAD = """\
| | spmdrl | peer | ratio | pairs | goal | processor | date | commit |
|---|---|---|---|---|---|---|---|---|
"""
NOISE_WORDS = re.compile(r"\((R|TM)\)|@.*|\b(CPU|Processor|\d+-Core)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A row of the tables that has been measured."""

    name: str
    benchmark: Benchmark
    result: Json


def main(argv: Sequence[str] | None = None) -> int:
    """Check or write the pages; 1 when one of them shows something else than was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages instead of checking them")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the repository")
    args = parser.parse_args(argv)
    measured = list(read(args.root, BENCHMARKS))
    if missing := [name for name in BENCHMARKS if name not in {row.name for row in measured}]:
        print(f"not measured yet: {', '.join(missing)}")
    wanted = pages(args.root, measured)
    differing = [page for page, text in wanted.items() if page.read_text("utf-8") != text]
    for page in differing:
        if args.write:
            page.write_text(wanted[page], "utf-8")
        name = page.relative_to(args.root)
        print(f"{name}: written" if args.write else f"{name} does not show what was measured: run `make bench-table`")
    return 1 if differing and not args.write else 0


def read(root: Path, benchmarks: Mapping[str, Benchmark]) -> Iterator[Measured]:
    """The rows that have a result file."""
    for name, benchmark in benchmarks.items():
        path = root / "benchmarks" / "results" / f"{name}.json"
        if path.exists():
            result = json.loads(path.read_text("utf-8"))
            yield Measured(name=name, benchmark=benchmark, result=result)


def pages(root: Path, measured: Iterable[Measured]) -> Mapping[Path, str]:
    """The text of each page as it should be."""
    rows = list(measured)
    tables = {
        root / "README.md": table(row for row in rows if row.benchmark.in_readme),
        root / "docs" / "benchmarks.md": table(rows, names=True),
    }
    return {page: with_table(page.read_text("utf-8"), table, str(page)) for page, table in tables.items()}


def with_table(text: str, table: str, page: str) -> str:
    """The page with this table between its markers."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    assert start and end, f"{page} has no place for the table: put {START.strip()} and {END} where it belongs"
    return f"{before}{START}{table}{END}{after}"


def table(measured: Iterable[Measured], *, names: bool = False) -> str:
    """The rows in markdown, with the names of their benchmarks if asked."""
    return HEAD + "".join(f"| {' | '.join(cells(row, names=names))} |\n" for row in measured)


def cells(row: Measured, *, names: bool) -> Iterator[str]:
    """The cells of a row."""
    result = row.result
    ratios, unit = result["ratios"], result["unit"]
    yield f"{row.benchmark.about} (`{row.name}`)" if names else row.benchmark.about
    yield quantity(result["spmdrl_median"], unit)
    yield f"{quantity(result['peer_median'], unit)}, {result['peer']}"
    yield number(result["ratio"])
    yield f"{number(min(ratios))} to {number(max(ratios))}" if len(ratios) > 1 else "one"
    yield verdict(result["ratio"], row.benchmark.goal)
    yield processor(result["machine"]["cpu"])
    yield result["date"]
    yield short(result["commit"])


def quantity(value: float, unit: str) -> str:
    """A number with its unit."""
    return f"{value:.3f} s" if unit == "s" else f"{value:,.0f} {unit}"


def number(ratio: float) -> str:
    """Two digits behind the point; one that counts where those would be zeros."""
    return f"{ratio:.2f}" if ratio >= 0.005 else f"{ratio:.1g}"


def processor(cpu: str) -> str:
    """The name without what all processors have in theirs."""
    return " ".join(NOISE_WORDS.sub(" ", cpu).split())


def short(commit: str) -> str:
    """Seven digits, and whether files differed from it."""
    digits, _, changes = commit.partition(" ")
    return f"{digits[:7]} {changes}".strip()


if __name__ == "__main__":
    sys.exit(main())
