"""A run's folder for sinks; and the numbers that trackers have written offline.

As a program it prints {run: {step: {name: number}}} as JSON, or with `report` as its first argument it is a run."""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdrl.config import ReportConfig
from spmdrl.config.run import SinksConfig
from spmdrl.report import Report, RunFolder
from spmdrl.report.files import MetricsFile
from spmdrl.report.sinks import sinks_of


def set_sinks(run: Path, sinks: Mapping[str, Mapping[str, Any]]) -> None:
    lines = ["[report]"]
    for kind, cfg in sinks.items():
        params = cfg.get("params", {})
        lines.append(f"[report.sinks.{kind}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in cfg.items() if name != "params"]
        lines += [f"params.{name} = {json.dumps(value)}" for name, value in params.items()]
    (run / "config.toml").write_text("\n".join(lines))


def report(run: Path, *, start_step: int | None = None) -> Report:
    sinks, _ = sinks_of(run)
    cfg = ReportConfig(tensorboard=False, console="plain", sinks=SinksConfig(**sinks))
    return Report(cfg, RunFolder(run), num_steps=100, active=True, start_step=start_step)


def run_until(run: Path, start_step: int, end: int, shift: float, *, stays: bool) -> None:
    """Report the steps after a checkpoint as a run does, and end it, or wait to be killed."""
    one = report(run, start_step=start_step)
    for step in range(start_step + 1, end):
        one.step(step, {"reward/mean": step / 7, "update/loss": step / 3 + shift}, samples=[], histograms={})
    if stays:
        print("ready", flush=True)
        time.sleep(600)
    one.close()


def write_rows(run: Path, steps: Sequence[int], *, start_step: int, shift: float = 0.0) -> None:
    """Write rows as a run does: a step's own, then its evaluation's numbers added to the same row."""
    file = MetricsFile(run / "metrics.jsonl", start_step=start_step)
    for step in steps:
        file.write(step, {"reward/mean": step / 7, "time/step_s": step / 3 + shift, "update/nan": math.nan})
        if step % 2 == 0:
            file.write(step, {"eval/accuracy": step / 11})
    file.close()


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
    if sys.argv[1] == "report":
        _, _, run, start, end, shift, *stays = sys.argv
        run_until(Path(run), int(start), int(end), float(shift), stays=bool(stays))
        sys.exit()
    kind, sinks = sys.argv[1:]
    found: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for run, step, name, value in READERS[kind](Path(sinks)):
        assert name not in found[run][step], f"{name} of step {step} is there twice"
        found[run][step][name] = value
    print(json.dumps(found))
