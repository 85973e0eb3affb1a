"""docs/troubleshooting.md quotes messages and metrics as the code has them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
QUOTE = re.compile(r"^\| `(.+?)`(?= )", re.MULTILINE)
METRIC = re.compile(r"^[a-z]+/[a-z0-9_]+$")


def texts() -> Iterator[str]:
    """Every piece of text that the package or a script of launch/ can print, cut where a value is put in."""
    for path in sorted((ROOT / "spmdrl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for path in sorted((ROOT / "launch").iterdir()):
        if path.is_file():
            yield path.read_text(encoding="utf-8")


def quoted() -> list[str]:
    return [quote.replace("\\|", "|") for quote in QUOTE.findall(PAGE)]


def test_every_message_is_in_the_code() -> None:
    code = "\0".join(texts())
    messages = [quote for quote in quoted() if not METRIC.match(quote)]
    assert len(messages) > 30
    for message in messages:
        pieces = [piece for piece in message.split("...") if piece.strip(" ,;:.")]
        assert sum(map(len, pieces)) > 10, f"too short to be found: {message}"
        assert [piece for piece in pieces if piece.strip() not in code] == [], message


def test_every_metric_is_reported() -> None:
    code = "\0".join(texts())
    metrics = [quote for quote in quoted() if METRIC.match(quote)]
    assert len(metrics) > 8
    phases = {metric for metric in metrics if metric.startswith("time/")}  # of the names of phases, with _s
    assert {metric for metric in metrics if metric not in code} - phases == set()
    assert all(f"\0{metric[5:-2]}\0" in code for metric in phases)
