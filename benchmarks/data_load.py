"""Measure what opening large data files takes: 1,000,000 rows of jsonl, and 10 GB of parquet.

    python benchmarks/data_load.py                                    (about 10 minutes, and 11 GB of disk)
    python benchmarks/data_load.py --rows 10000 --parquet-gb 0.1      (a few seconds)

The files are made in a temporary folder and removed. For each, a process of its own makes the stream of training
prompts as a run does, which reads, checks and tokenizes every row, then takes prompts in the stream's order. A thread
samples RssAnon, memory of our own; it may grow by 512 MiB and 32 bytes for each row, whatever the size of the file.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import transformers
from load_memory import MIB, ResidentMemory
from program import run_again

from spmdrl.config import DataConfig, FileData
from spmdrl.data.stream import make_training_stream
from spmdrl.tools.tiny_model import character_tokenizer

ROW_BYTES = 10_000  # of a parquet row: a prompt and its tests
GROUP_ROWS = 5_000  # of a row group
PROMPTS_TAKEN = 512
ROOM_BYTES, ROOM_BYTES_PER_ROW = 512 * MIB, 32


def main() -> None:
    """Write the files, open each in a process of its own, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the jsonl file")
    parser.add_argument("--parquet-gb", type=float, default=10.0, help="10^9 bytes of the parquet file")
    parser.add_argument("--opens", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)  # set by this program
    args = parser.parse_args()
    if args.opens:
        print(json.dumps(measure(*args.opens)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_jsonl(folder / "rows.jsonl", args.rows)
        write_parquet(folder / "rows.parquet", int(args.parquet_gb * 10**9) // ROW_BYTES)
        files = {kind: opened(kind, folder / f"rows.{kind}") for kind in ("jsonl", "parquet")}
    versions = {
        "python": sys.version.split()[0],
        "pyarrow": pyarrow.__version__,
        "transformers": transformers.__version__,
    }
    worst = max(file["growth_over_limit"] for file in files.values())
    print(json.dumps({"files": files, "growth_over_limit": worst, "versions": versions}))


def question(number: int) -> str:
    """A prompt of some 60 characters."""
    return f"What is {number} + {number % 977}? Answer with the number alone, please."


def write_jsonl(path: Path, num_rows: int) -> None:
    """Write rows with a prompt, an answer and a column for the reward."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            row = {"prompt": question(number), "answer": str(number + number % 977), "level": number % 5}
            file.write(json.dumps(row) + "\n")


def write_parquet(path: Path, num_rows: int) -> None:
    """Write rows with a prompt, an answer and a long column that no compression makes smaller."""
    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("prompt", "answer", "tests")])
    with pyarrow.parquet.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, num_rows, GROUP_ROWS):
            numbers = range(first, min(first + GROUP_ROWS, num_rows))
            columns = {
                "prompt": [question(number) for number in numbers],
                "answer": [str(number + number % 977) for number in numbers],
                "tests": [os.urandom(ROW_BYTES // 2 - 50).hex() for _ in numbers],
            }
            writer.write_table(pyarrow.table(columns, schema=schema))


def count_rows(kind: str, path: str) -> int:
    """Count the rows of a file, without spmdrl."""
    if kind == "parquet":
        return pyarrow.parquet.read_metadata(path).num_rows
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def opened(kind: str, path: Path) -> Mapping[str, Any]:
    """Measure in a new process."""
    found: Mapping[str, Any] = run_again("--opens", kind, str(path))
    return found


def measure(kind: str, path: str) -> Mapping[str, Any]:
    """Make the stream of a file's prompts and take some of them."""
    cfg = DataConfig(sources=(FileData(kind=kind, path=path),), max_prompt_tokens=200)  # type: ignore[arg-type]
    tokenizer = character_tokenizer()
    tokenizer(question(0))
    with ResidentMemory() as memory:
        began = time.perf_counter()
        stream = make_training_stream(cfg, None, seed=0, tokenizer=tokenizer)
        start_s = time.perf_counter() - began
        began = time.perf_counter()
        for index in range(PROMPTS_TAKEN):
            stream.take(index, 1)
        take_ms = (time.perf_counter() - began) / PROMPTS_TAKEN * 1e3
    found = memory.result()
    num_rows = count_rows(kind, path)
    grown = (found["peak_anon_mib"] - found["anon_before_mib"]) * MIB
    return {
        "file_bytes": Path(path).stat().st_size,
        "num_rows": num_rows,
        "start_s": start_s,
        "take_ms": take_ms,
        **found,
        "growth_over_limit": grown / (ROOM_BYTES + ROOM_BYTES_PER_ROW * num_rows),
    }


if __name__ == "__main__":
    main()
