"""The numbers that trackers have written offline on a disk: prints {run: {step: {name: number}}} as JSON."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

Found = Iterator[tuple[str, int, str, float]]  # run, step, name, value

_BLOCK, _HEADER = 32768, 7


def records(path: Path) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, after a header of as many bytes as each record has."""
    data, place, parts = path.read_bytes(), _HEADER, b""
    while place + _HEADER <= len(data):
        if _BLOCK - place % _BLOCK < _HEADER:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + _HEADER])
        parts += data[place + _HEADER : place + _HEADER + length]
        place += _HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def wandb(sinks: Path) -> Found:
    from wandb.proto import wandb_internal_pb2

    for path in sorted(sinks.glob("wandb/offline-run-*/*.wandb")):
        for data in records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                if not name.startswith(("_", "samples.", "curves.")):
                    yield path.stem.removeprefix("run-"), int(items["_step"]), name, float(value)


def trackio(sinks: Path) -> Found:
    for path in (sinks / "trackio").glob("*.db"):
        with sqlite3.connect(path) as database:
            for run, step, metrics in database.execute("select run_name, step, metrics from metrics"):
                for name, value in json.loads(metrics).items():
                    if not isinstance(value, dict):  # a picture or a text
                        yield run, step, name, float(value)


def mlflow(sinks: Path) -> Found:
    with sqlite3.connect(sinks / "mlflow.db") as database:
        query = "select m.run_uuid, step, key, value, is_nan from metrics m join runs r on m.run_uuid = r.run_uuid"
        for run, step, name, value, is_nan in database.execute(f"{query} where r.lifecycle_stage = 'active'"):
            yield run, step, name, float("nan") if is_nan else value


def swanlab(sinks: Path) -> Found:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for path in sorted(sinks.glob("swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "scalar":
                yield path.stem.removeprefix("run-"), record.scalar.step, record.scalar.key, record.scalar.value.number


READERS: dict[str, Callable[[Path], Found]] = {"wandb": wandb, "trackio": trackio, "mlflow": mlflow, "swanlab": swanlab}

if __name__ == "__main__":
    kind, sinks = sys.argv[1:]
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for run, step, name, value in READERS[kind](Path(sinks)):
        assert name not in found[run][step], f"{name} of step {step} is there twice"
        found[run][step][name] = value
    print(json.dumps(found))
