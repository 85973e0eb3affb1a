"""The rows of a data file, found by their places and read when they are needed: the file may be larger than memory.

A place is a whole number: of a line in a jsonl file, of a row in a parquet file, both from 0.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from spmdrl.config.strict import Malformed, about, open_file, parse_json, shown
from spmdrl.types import UserError

Record = dict[str, Any]

MAX_ROW_BYTES = 64 * 2**20  # of a line of jsonl
_BATCH_ROWS = 256
_CACHED_BYTES = 256 * 2**20  # row groups of a parquet file that are kept, as Arrow counts them; one at least


class Rows(Protocol):
    """The records of a file that does not change while it is read."""

    path: str

    def scan(self) -> Iterator[tuple[int, Record]]:
        """Yield every record with its place, in the order of the file. Raises UserError for the first that is none."""
        ...

    def read(self, place: int) -> Record:
        """Return the record at a place that `scan` has yielded. Raises UserError when the file has changed since."""
        ...

    def where(self, place: int) -> str:
        """Name a place for messages, such as "train.jsonl line 12"."""
        ...


def open_rows(kind: str, path: str) -> Rows:
    """Open a data file of this kind, "jsonl" or "parquet". Raises UserError when it cannot be read."""
    return JsonLines(path) if kind == "jsonl" else ParquetRows(path)


class JsonLines:
    """The lines of a jsonl file, by the byte at which each begins: 8 bytes of memory for each line."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open_file(path)
        self._version = _version(self._file.fileno())
        self._ends = array("Q", [0])  # of the lines before each place, in bytes

    def where(self, place: int) -> str:
        return f"{Path(self.path).name} line {place + 1}"

    def scan(self) -> Iterator[tuple[int, Record]]:
        """Blank lines are passed over."""
        ends = array("Q", [0])
        with open_file(self.path) as file:
            while line := file.readline(MAX_ROW_BYTES + 1):
                number = len(ends) - 1
                if len(line) > MAX_ROW_BYTES:
                    raise UserError(f"{self.where(number)} has more than {MAX_ROW_BYTES >> 20} MiB; is it one object?")
                ends.append(ends[-1] + len(line))
                if not line.isspace():
                    yield number, self._parsed(line, number)
        self._ends = ends

    def read(self, place: int) -> Record:
        start, end = self._ends[place], self._ends[place + 1]
        line = os.pread(self._file.fileno(), end - start, start)
        _require_unchanged(self.path, self._file.fileno(), self._version)
        return self._parsed(line, place)

    def _parsed(self, line: bytes, number: int) -> Record:
        with about(self.where(number)):
            record = parse_json(line)
            if not isinstance(record, dict):
                raise Malformed(f"is not a JSON object but {type(record).__name__}")
            return record


class ParquetRows:
    """The rows of a local parquet file; a row is read with the row group that it lies in."""

    def __init__(self, path: str) -> None:
        import pyarrow.parquet  # takes 0.7 s, so only when it is needed

        self.path = path
        self._file = open_file(path)  # Arrow would take a name such as s3://... for one on the network
        self._version = _version(self._file.fileno())
        self._refused = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
        try:
            self._parquet = pyarrow.parquet.ParquetFile(self._file)
        except self._refused as error:
            raise UserError(f"{shown(path)} is not a parquet file: {_one_line(error)}") from error
        metadata = self._parquet.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = [0, *accumulate(sizes)]
        self._kept: OrderedDict[int, Any] = OrderedDict()  # row groups as tables, the one used last at the end
        if twice := [name for name, count in Counter(self._parquet.schema_arrow.names).items() if count > 1]:
            raise UserError(f'{shown(path)} has the column "{twice[0]}" twice; rename one of them')

    def where(self, place: int) -> str:
        return f"{Path(self.path).name} row {place + 1}"

    def scan(self) -> Iterator[tuple[int, Record]]:
        for group, start in enumerate(self._starts[:-1]):
            table = self._group(group)
            for first in range(0, table.num_rows, _BATCH_ROWS):
                yield from enumerate(self._records(table, first, start), start=start + first)

    def read(self, place: int) -> Record:
        group = bisect_right(self._starts, place) - 1
        return self._record(self._group(group), place - self._starts[group], place)

    def _group(self, group: int) -> Any:
        if group not in self._kept:
            _require_unchanged(self.path, self._file.fileno(), self._version)
            try:
                table = self._parquet.read_row_group(group)
            except self._refused as error:
                raise UserError(
                    f"{shown(self.path)} cannot be read: its rows {self._starts[group] + 1} to "
                    f"{self._starts[group + 1]} are damaged: {_one_line(error)}"
                ) from error
            self._kept[group] = table
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > _CACHED_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]

    def _records(self, table: Any, first: int, start: int) -> list[Record]:
        """Convert a batch of rows, which is much faster than one by one; one by one to name the one that is wrong."""
        batch = table.slice(first, _BATCH_ROWS)
        try:
            return batch.to_pylist()
        except self._refused:
            return [self._record(batch, number, start + first + number) for number in range(batch.num_rows)]

    def _record(self, table: Any, number: int, place: int) -> Record:
        try:
            (record,) = table.slice(number, 1).to_pylist()
        except self._refused as error:
            raise UserError(f"{self.where(place)} holds a value that cannot be read: {_one_line(error)}") from error
        return record


def _version(descriptor: int) -> tuple[int, int]:
    """Return what changes when somebody writes to the file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _require_unchanged(path: str, descriptor: int, version: tuple[int, int]) -> None:
    if _version(descriptor) != version:
        raise UserError(
            f"{shown(path)} was written to while the run was reading it, so that its rows are no longer known; restore "
            "it, or copy it to a place where nobody writes, and start the run again"
        )


def _one_line(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error))[:200]
