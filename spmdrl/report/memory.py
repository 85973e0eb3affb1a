"""The memory of every rank at the changes between trainer and engine: how it is read, and how it is shown."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmdrl.phase_memory import PhaseMemory

_GIB = 2**30
_COLUMNS = ("free", "reserved", "allocated", "host", "pinned")

# Spans of the loop, and the predicted phases that happen in them.
PREDICTED = {
    "rollout": ("rollout",),
    "logprobs": ("logprobs",),
    "update": ("forward-backward", "critic", "optimizer"),
    "refit": ("refit",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """One rank's memory at one moment; what is about a device is 0 on a CPU."""

    total_bytes: int = 0  # of the device
    free_bytes: int = 0  # of the device, for every process
    reserved_bytes: int = 0  # by torch's allocator in this process
    allocated_bytes: int = 0  # of that, in tensors
    host_bytes: int  # resident set of this process
    pinned_bytes: int = 0  # host memory that the device can copy from by itself


@dataclass(frozen=True, slots=True)
class Edge:
    """A change that was made, and each rank's memory after it."""

    name: str
    seconds: float
    readings: tuple[MemoryReading, ...]  # in the order of the ranks


def read_memory(device: torch.device) -> MemoryReading:
    """This rank's memory now."""
    if device.type != "cuda":
        return MemoryReading(host_bytes=resident_bytes())
    free, total = torch.cuda.mem_get_info()
    return MemoryReading(
        total_bytes=total,
        free_bytes=free,
        reserved_bytes=torch.cuda.memory_reserved(),
        allocated_bytes=torch.cuda.memory_allocated(),
        host_bytes=resident_bytes(),
        pinned_bytes=int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)),
    )


def resident_bytes() -> int:
    """Host memory that this process has resident now; its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def take_peak_bytes() -> int:
    """The most that torch had allocated on this rank's device since the last call, or, without a device, the most that
    this process ever had resident: the system keeps no other peak of it."""
    if not torch.cuda.is_initialized():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def prediction_table(step: int, phases: Sequence[PhaseMemory], scalars: Mapping[str, float], *, on_gpu: bool) -> str:
    """Predicted beside measured, for each span that has a prediction and a peak among a step's scalars.

    Without a device the measured numbers never fall, so the predicted ones are those of the fullest phase until then.
    """
    by_name = {
        phase.name: phase.process_bytes if on_gpu else phase.process_bytes + phase.host_bytes for phase in phases
    }
    rows, highest = [["phase", "predicted", "measured"]], 0 if on_gpu else by_name["load"]
    for span, names in PREDICTED.items():
        measured, predicted = (
            scalars.get(f"memory/{span}_peak_gib"),
            [by_name[name] for name in names if name in by_name],
        )
        if measured is not None and predicted:
            highest = max(predicted) if on_gpu else max(highest, *predicted)
            rows.append([span, f"{highest / _GIB:.2f}", f"{measured:.2f}"])
    what = "torch's allocations on the fullest device" if on_gpu else "resident host memory of the largest rank so far"
    return "\n".join([f"peaks in step {step}, GiB: {what}", *_aligned(rows)])


def edge_row(edge: Edge) -> dict[str, Any]:
    """For memory.jsonl: each column is a list of every rank's GiB."""
    columns = {f"{column}_gib": [round(size, 4) for size in _column(edge, column)] for column in _COLUMNS}
    return {"edge": edge.name, "seconds": round(edge.seconds, 4)} | columns


def memory_table(step: int, edges: Sequence[Edge]) -> str:
    """One line an edge: lowest and highest over the ranks where they differ. Columns that say nothing are left out."""
    if not edges:
        return ""
    num_ranks = len(edges[0].readings)
    shown = [column for column in _COLUMNS if any(size for edge in edges for size in _column(edge, column))]
    head = ["edge", "s", *shown]
    rows = [[edge.name, f"{edge.seconds:.2f}", *(_range(_column(edge, name)) for name in shown)] for edge in edges]
    return "\n".join([f"memory in step {step}, GiB, of {num_ranks} ranks", *_aligned([head, *rows])])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: names on the left, numbers on the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    names = [cell.ljust(widths[0]) for cell in columns[0]]
    numbers = [[cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)]
    return ["  " + "  ".join(cells) for cells in zip(names, *numbers, strict=True)]


def _column(edge: Edge, column: str) -> list[float]:
    """Each rank's GiB."""
    return [getattr(reading, f"{column}_bytes") / _GIB for reading in edge.readings]


def _range(sizes: Sequence[float]) -> str:
    low, high = f"{min(sizes):.2f}", f"{max(sizes):.2f}"
    return low if low == high else f"{low}-{high}"
