"""docs/tools.md is what the programs' own parsers say."""

from __future__ import annotations

from pathlib import Path

from docs.gen.tools_reference import reference

ROOT = Path(__file__).parents[2]


def test_the_page_is_that_of_the_programs() -> None:
    assert (ROOT / "docs/tools.md").read_text(encoding="utf-8") == reference(), "run `make docs`"
