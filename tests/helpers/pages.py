"""Pages of the documentation, as tests read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)


def prose(page: Path) -> str:
    """The text of a page without its blocks of code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> Iterator[str]:
    """The names that GitHub gives the headings of a page."""
    for heading in HEADING.findall(prose(page)):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def is_broken(link: str, page: Path) -> bool:
    """True when a link of a page leads to no file, or to a heading that is not there."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return not target.exists() or (anchor != "" and anchor not in anchors(target))
