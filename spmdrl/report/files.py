"""metrics.jsonl, samples.jsonl and their like: one JSON object per line, in the order of steps, each step once.

JSON cannot represent nan or infinity: a number that is not finite is written as null.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from spmdrl.config.base import INT32_MAX
from spmdrl.config.strict import Malformed, about, conform, parse_own_json, read_bytes, shown
from spmdrl.faults.files import open_ordinary
from spmdrl.types import UserError

MetricsRow = dict[str, Any]

_Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TAIL_BYTES = 1 << 18  # of a file, that `last_rows` reads


def read_rows(path: Path) -> list[MetricsRow]:
    """Read the rows of a file that may still be growing: an incomplete last line is ignored."""
    return [row for row, _ in _rows_with_ends(path)]


def read_scalars(path: Path) -> list[MetricsRow]:
    """Read the rows of metrics.jsonl: scalars by name, None where one was not finite. Raises UserError."""
    rows = read_rows(path)
    with about(path):
        for row, following in itertools.pairwise(rows):
            if row["step"] == following["step"]:
                raise Malformed(f"has two rows of step {row['step']}")
        return conform(rows, list[dict[str, _Integer | float | None]])


def last_rows(path: Path, count: int) -> list[MetricsRow]:
    """Read the last rows of a file that may be long and may still be growing; lines that are not whole are passed
    over, and a file that cannot be read has none."""
    try:
        with open_ordinary(path) as file:
            begin = max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES)
            file.seek(begin)
            lines = file.read().split(b"\n")[1 if begin else 0 : -1]
    except OSError:
        return []
    rows = []
    for line in lines[-count:]:
        with contextlib.suppress(Malformed):
            rows.append(parse_own_json(line))
    return [row for row in rows if isinstance(row, dict)]


def missing_steps(rows: Sequence[MetricsRow], step: int) -> list[int]:
    """Return the steps up to `step` that have no row in metrics.jsonl.

    A run that began with the checkpoint of another one has no row before its own first one, and lacks none.
    """
    written = {row["step"] for row in rows}
    return [one for one in range(min(written, default=1), step + 1) if one not in written]


def is_torn(path: Path) -> bool:
    """True when the last line of a file is incomplete: it is being written, or its writer was killed."""
    try:
        with open_ordinary(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 1))
            return file.read() not in (b"", b"\n")
    except OSError:
        return False


def cut_after(path: Path, step: int) -> list[MetricsRow]:
    """Remove the rows after `step` from the file, and return the others.

    A run that resumes from a checkpoint repeats the later steps. A line that a killed run left incomplete is cut too.
    """
    earlier = [(row, end) for row, end in _rows_with_ends(path) if row["step"] <= step]
    if path.exists():
        os.truncate(path, earlier[-1][1] if earlier else 0)
    return [row for row, _ in earlier]


class MetricsFile:
    """Writes metrics.jsonl: one row per step, flushed at once.

    `start_step` is the last finished step, -1 for a new run; rows after it are removed.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        self.rows_before = cut_after(path, start_step)
        self._file = path.open("r+b" if path.exists() else "w+b")
        ends = [0, *(end for _, end in _rows_with_ends(path))]
        self._row_start = ends[-2] if self.rows_before else 0
        self._row: MetricsRow = dict(self.rows_before[-1]) if self.rows_before else {"step": -1}
        self._file.seek(ends[-1])

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the row of `step`, or add to it if it is the last row."""
        last_step = self._row["step"]
        assert step >= last_step, f"a row for step {step} after the row for step {last_step}"
        if step > last_step:
            self._row_start, self._row = self._file.tell(), {"step": step}
        self._row |= dict(scalars)
        # One write over the shorter row: the step is never missing from the file, even if the run is killed.
        self._file.seek(self._row_start)
        self._file.write(_line(self._row))
        self._file.truncate()

    def close(self) -> None:
        self._file.close()


class StepRowsFile:
    """Writes a few rows per step, such as the rollouts of samples.jsonl. Without rows there is no file."""

    def __init__(self, path: Path, *, start_step: int) -> None:
        cut_after(path, start_step)
        self._path = path

    def write(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        with self._path.open("ab") as file:
            # A prompt's metadata can hold anything that data files can, such as dates: other types are written as text.
            file.write(b"".join(_line({"step": step, **row}, default=str) for row in rows))


def _rows_with_ends(path: Path) -> list[tuple[MetricsRow, int]]:
    """Return each row with the byte offset where its line ends."""
    rows: list[tuple[MetricsRow, int]] = []
    end = 0
    content = read_bytes(path, max_bytes=sys.maxsize) if path.exists() else b""
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        end += len(line) + 1
        try:
            row = parse_own_json(line)
            if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] <= INT32_MAX:
                raise Malformed("is no object with a step")
            if rows and row["step"] < rows[-1][0]["step"]:
                raise Malformed(f"is of step {row['step']}, after one of step {rows[-1][0]['step']}")
        except Malformed as error:
            raise UserError(f"{shown(path)}: line {number} {error}; remove that line to go on") from error
        rows.append((row, end))
    return rows


def _line(row: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    text = json.dumps(finite(row), ensure_ascii=False, allow_nan=False, default=default)
    # Text from outside can hold what UTF-8 cannot encode, and what a terminal obeys; escaped, it is the same text.
    if not text.isprintable():
        text = "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)
    return text.encode() + b"\n"


def finite(value: Any) -> Any:
    """Return a value as JSON can hold it: with None for every number that is not finite."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: finite(inner) for key, inner in value.items()}
        case list() | tuple():
            return [finite(inner) for inner in value]
        case _:
            return value
