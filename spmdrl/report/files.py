"""metrics.jsonl and samples.jsonl: one JSON object a line, in the order of steps, each step once.

JSON has no word for nan or infinity: a number that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.types import UserError

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that may still be written: a last line without its end is left out."""
    return [row for row, _ in _rows_with_ends(path)]


def cut_after(path: Path, step: int) -> list[Row]:
    """Keep the rows up to and including `step`, drop the others from the file, and return those kept.

    A run that goes on from a checkpoint does the later steps again; a line that was cut short when the run was killed
    goes too.
    """
    kept = [(row, end) for row, end in _rows_with_ends(path) if row["step"] <= step]
    if path.exists():
        os.truncate(path, kept[-1][1] if kept else 0)
    return [row for row, _ in kept]


class MetricsFile:
    """Writes metrics.jsonl: a row per step, on disk as soon as it is written.

    `start_step` is the last step already done, -1 when the run starts anew; rows after it are dropped.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        self.rows_before = cut_after(path, start_step)
        self._file = path.open("r+b" if path.exists() else "w+b")
        ends = [0, *(end for _, end in _rows_with_ends(path))]
        self._row_start = ends[-2] if self.rows_before else 0
        self._row: Row = dict(self.rows_before[-1]) if self.rows_before else {"step": -1}
        self._file.seek(ends[-1])

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the row of `step`, or add to it when it is the last one written."""
        last_step = self._row["step"]
        assert step >= last_step, f"a row for step {step} after the row for step {last_step}"
        if step > last_step:
            self._row_start, self._row = self._file.tell(), {"step": step}
        self._row |= dict(scalars)
        # Written over the shorter row in one piece: a kill never leaves the file without this step.
        self._file.seek(self._row_start)
        self._file.write(_line(self._row))
        self._file.truncate()

    def close(self) -> None:
        self._file.close()


class StepRowsFile:
    """Writes a few rows for every step, such as the rollouts of samples.jsonl, on disk as soon as they are written."""

    def __init__(self, path: Path, *, start_step: int) -> None:
        cut_after(path, start_step)
        self._file = path.open("ab")

    def write(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        # The metadata of a prompt can hold what a data file can, such as dates: what has no JSON is written as text.
        self._file.write(b"".join(_line({"step": step, **row}, default=str) for row in rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rows_with_ends(path: Path) -> list[tuple[Row, int]]:
    """Each row with the byte offset where its line ends."""
    rows: list[tuple[Row, int]] = []
    end = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True) if path.exists() else [], start=1):
        if not line.endswith(b"\n"):
            break
        end += len(line)
        try:
            rows.append((json.loads(line), end))
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not JSON ({error}); remove that line to go on") from error
    return rows


def _line(row: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    text = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False, default=default) + "\n"
    # Half a surrogate pair, which text from outside can hold, has no UTF-8; escaped like this it is JSON again.
    return text.encode("utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    """The value with every number that is not finite replaced by None."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value
