"""The rows of a data file, found by their places and read when they are needed: the file may be larger than memory.

A place is a whole number: of a line in a jsonl file, of a row in a parquet file, both from 0.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Protocol

from spmdrl.config.strict import Malformed, about, open_file, parse_json, shown
from spmdrl.faults.text import sentence_of
from spmdrl.types import UserError

Record = dict[str, Any]

MAX_ROW_BYTES = 64 * 2**20  # of a line of jsonl
_BATCH_ROWS = 256
_CACHED_BYTES = 256 * 2**20  # of the cached rows of a parquet file, as Arrow counts them
_BUFFER_BYTES = 2**20  # for each column of a parquet file that is being read
_ROWS_AHEAD = 16_384  # at most, that one pass over a row group searches for


class Rows(Protocol):
    """The records of a file that does not change while it is read."""

    path: str

    def scan(self) -> Iterator[tuple[int, Record]]:
        """Yield every record with its place, in the order of the file. Raises UserError for the first that is none."""
        ...

    def read(self, place: int, soon: Iterable[int] = ()) -> Record:
        """Return the record at a place that `scan` has yielded; `soon` are those that will be asked for next, in order.

        Raises UserError when the file has changed since.
        """
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
        self.path, self._name = path, Path(path).name
        self._file = open_file(path)
        self._version = _version(self._file.fileno())
        self._ends = array("Q", [0])  # of the lines before each place, in bytes

    def where(self, place: int) -> str:
        return f"{self._name} line {place + 1}"

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

    def read(self, place: int, soon: Iterable[int] = ()) -> Record:
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


class _CachedRows:
    """Cached rows of one row group, in batches of Arrow's."""

    def __init__(self, numbers: Sequence[int], batches: Sequence[Any]) -> None:
        """`numbers` are those of the rows in their row group, rising."""
        self._numbers, self._batches = numbers, batches
        self._ends = [*accumulate(batch.num_rows for batch in batches)]
        self.num_bytes = sum(batch.nbytes for batch in batches)

    def find(self, number: int) -> tuple[Any, int] | None:
        """Return the batch that has a row of the group, and the row's place in it; None where it is not cached."""
        at = bisect_left(self._numbers, number)
        if at == len(self._numbers) or self._numbers[at] != number:
            return None
        batch = self._batches[bisect_right(self._ends, at)]
        return batch, at - self._ends[bisect_right(self._ends, at)] + batch.num_rows


class ParquetRows:
    """The rows of a local parquet file, which are read in batches.

    A file for which there is room is cached whole. Of another one no row group is ever in memory whole: the pass
    over a group that reads one row also takes out those that will be asked for soon.
    """

    def __init__(self, path: str) -> None:
        import pyarrow.parquet  # takes 0.7 s, so only when it is needed

        self.path, self._name = path, Path(path).name
        self._file = open_file(path)  # Arrow would take a name such as s3://... for one on the network
        self._version = _version(self._file.fileno())
        # The last is that of a time zone that is unknown.
        self._refused = (pyarrow.ArrowException, OSError, ValueError, OverflowError, LookupError)
        self._to_array = pyarrow.array
        try:
            # By default, Arrow would first read all of a row group.
            self._parquet = pyarrow.parquet.ParquetFile(self._file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except self._refused as error:
            raise UserError(f"{shown(path)} is not a parquet file: {sentence_of(error)}") from error
        metadata = self._parquet.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = [0, *accumulate(sizes)]
        self._num_bytes = 0  # of all rows, as `scan` has found them
        self._cached: OrderedDict[int, _CachedRows] = OrderedDict()  # by row group, the one used last at the end
        if twice := [name for name, count in Counter(self._parquet.schema_arrow.names).items() if count > 1]:
            raise UserError(f'{shown(path)} has the column "{twice[0]}" twice; rename one of them')

    def where(self, place: int) -> str:
        return f"{self._name} row {place + 1} of {self._starts[-1]}"

    def scan(self) -> Iterator[tuple[int, Record]]:
        """Yield every row with its number, in the file's order, a batch of rows in memory at a time."""
        place = num_bytes = 0
        for group in range(len(self._starts) - 1):
            for batch in self._batches(group):
                yield from enumerate(self._records(batch, place), start=place)
                place += batch.num_rows
                num_bytes += batch.nbytes
        self._num_bytes = num_bytes

    def read(self, place: int, soon: Iterable[int] = ()) -> Record:
        """Return a row by its number. Reads those of `soon` in its row group with it; old row groups are dropped."""
        group = bisect_right(self._starts, place) - 1
        number = place - self._starts[group]
        found = self._cached[group].find(number) if group in self._cached else None
        if found is None:
            self._cached[group] = part = self._part(group, self._wanted(group, number, soon))
            found = part.find(number)
            assert found is not None, "it is wanted"
        self._cached.move_to_end(group)
        while len(self._cached) > 1 and sum(part.num_bytes for part in self._cached.values()) > _CACHED_BYTES:
            self._cached.popitem(last=False)
        return self._record(*found, place)

    def _wanted(self, group: int, number: int, soon: Iterable[int]) -> Sequence[int]:
        """Return the rows of a group to keep, rising, if one of them is needed."""
        start, end = self._starts[group], self._starts[group + 1]
        if self._num_bytes <= _CACHED_BYTES:
            return range(end - start)
        room = _CACHED_BYTES * self._starts[-1] // self._num_bytes
        ahead = islice(soon, min(room, _ROWS_AHEAD))
        return sorted({number, *(place - start for place in ahead if start <= place < end)})

    def _part(self, group: int, wanted: Sequence[int]) -> _CachedRows:
        """Read some rows of a row group."""
        cached, end = [], 0
        for batch in self._batches(group):
            start, end = end, end + batch.num_rows
            found = wanted[bisect_left(wanted, start) : bisect_left(wanted, end)]
            if len(found) == batch.num_rows:
                cached.append(batch)
            elif found:  # as a copy, so that the other rows are freed
                cached.append(batch.take(self._to_array([number - start for number in found])))
            if end > wanted[-1]:
                break
        return _CachedRows(wanted, cached)

    def _batches(self, group: int) -> Iterator[Any]:
        """Yield the rows of a row group, some at a time."""
        _require_unchanged(self.path, self._file.fileno(), self._version)
        try:
            yield from self._parquet.iter_batches(_BATCH_ROWS, row_groups=[group])
        except self._refused as error:
            raise UserError(
                f"{shown(self.path)} cannot be read: its rows {self._starts[group] + 1} to {self._starts[group + 1]} "
                f"are damaged: {sentence_of(error)}"
            ) from error

    def _records(self, batch: Any, first: int) -> list[Record]:
        """Convert a batch of rows, which is much faster than one by one; one by one to name the one that is wrong."""
        try:
            return batch.to_pylist()
        except self._refused:
            return [self._record(batch, number, first + number) for number in range(batch.num_rows)]

    def _record(self, batch: Any, number: int, place: int) -> Record:
        try:
            (record,) = batch.slice(number, 1).to_pylist()
        except self._refused as error:
            raise UserError(f"{self.where(place)} holds a value that cannot be read: {sentence_of(error)}") from error
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
