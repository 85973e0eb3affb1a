"""The planner beside what torch's own allocator has reserved: not below it, and not far above."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from spmdrl.memory.blocks import Blocks, ShardedWeight, Unit, gathering, reducing

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from memory_plan import planned_bytes, prediction, settings  # noqa: E402

ROWS = json.loads((ROOT / "benchmarks/results/memory-plan.json").read_text())["rows"]
MOST = 1.05
MIB = 2**20


def name(row: dict[str, Any]) -> str:
    return f"{row['shape']}, {row['ranks']} ranks, {row['way']}, {row['tokens']} tokens, {row['recompute']}"


def test_the_plan_is_between_what_is_reserved_and_a_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is of a torch whose attention takes grouped heads."""
    monkeypatch.setattr("spmdrl.preflight.forecast.varlen_takes_groups", lambda: True)
    ratios = {name(row): planned_bytes(row) / row["reserved"] for row in ROWS}
    assert not {case: ratio for case, ratio in ratios.items() if not 1 <= ratio <= MOST}


@pytest.mark.parametrize("row", [row for row in ROWS if row["ranks"] > 1], ids=name)
def test_the_streams_that_gather_and_reduce_are_planned_to_the_byte(row: dict[str, Any]) -> None:
    cfg, units = settings(row), prediction(row).rank.size.units
    on_host, weight_bytes = cfg.model.cpu_offload, 2 if cfg.lora else 4
    gathered = gathering(units, weight_bytes=weight_bytes, compute_bytes=2, on_host=on_host)
    reduced = reducing(units, copies=cfg.parallel.dp_replicate, on_host=on_host)
    _, *others = row["reserved_by_stream"]  # of the stream that computes first
    assert sorted(others) == sorted(size for size in (gathered, reduced) if size)


def test_blocks_are_cut_and_joined_as_torch_does() -> None:
    blocks = Blocks()
    small, medium, large = (blocks.take(size) for size in (1, 2 * MIB, 30 * MIB + 1))
    assert blocks.reserved == (2 + 20 + 32) * MIB
    blocks.take(18 * MIB)  # the rest of the medium segment
    blocks.take(MIB)  # of the small one
    assert blocks.reserved == (2 + 20 + 32) * MIB
    blocks.take(MIB)  # its rest is less
    assert blocks.reserved == (2 + 20 + 32 + 2) * MIB
    blocks.give(large)
    one, two = blocks.take(20 * MIB), blocks.take(12 * MIB)
    assert blocks.reserved == (2 + 20 + 32 + 2) * MIB
    blocks.give(one)
    blocks.give(two)
    blocks.take(32 * MIB)
    assert blocks.reserved == (2 + 20 + 32 + 2) * MIB, "neighbours were joined"
    blocks.give(small)
    blocks.give(medium)
    blocks.take(3 * MIB)
    assert blocks.reserved == (2 + 20 + 32 + 2 + 20) * MIB, "only 2 MiB were free"


def test_one_rank_gathers_nothing_and_copies_keep_two_of_each_gradient() -> None:
    units = [Unit((ShardedWeight(MIB, 1),))] * 3
    assert gathering(units, weight_bytes=4, compute_bytes=2) == 0
    # Of 4 MiB each; five of them come from a segment.
    assert [reducing(units, copies=copies) for copies in (1, 2)] == [20 * MIB, 40 * MIB]
