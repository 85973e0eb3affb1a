"""The memory of every rank at the changes between trainer and engine: how it is read, and how it is shown."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from spmdrl.memory.phases import PhaseMemory

_GIB = 2**30
_COLUMNS = ("free", "reserved", "allocated", "host", "pinned")

# Spans of a run in the order of their first time, and the predicted phases that happen in them.
PREDICTED = {
    "load": ("load",),
    "rollout": ("rollout",),
    "logprobs": ("logprobs",),
    "update": ("forward-backward", "critic", "optimizer"),
    "refit": ("refit",),
    "save": ("save",),
    "export": ("export",),
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


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory of this process at any moment of a stretch of time."""

    device_bytes: int | None  # allocated by torch on this rank's device; None where there is no device
    host_bytes: int  # resident

    @property
    def by_metric(self) -> dict[str, int]:
        """By the end of the metric's name: without a device it is the host's memory that can run out."""
        if self.device_bytes is None:
            return {"peak_gib": self.host_bytes}
        return {"peak_gib": self.device_bytes, "host_peak_gib": self.host_bytes}

    def merge(self, other: Peak) -> Peak:
        """Of both stretches, either with a device or without."""
        host_bytes = max(self.host_bytes, other.host_bytes)
        if self.device_bytes is None or other.device_bytes is None:
            return Peak(None, host_bytes)
        return Peak(max(self.device_bytes, other.device_bytes), host_bytes)


def restart_peaks() -> None:
    """Let `read_peak` tell of what comes from here on."""
    restart_host_peak()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def restart_host_peak() -> bool:
    """Let the system forget the most that this process had resident; False where it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def return_freed_host_memory() -> None:
    """Give the system back what the C library keeps of freed memory, where that is glibc."""
    with suppress(AttributeError):  # another library
        ctypes.CDLL(None).malloc_trim(0)


def read_peak() -> Peak:
    """Since `restart_peaks`; on the host since the process began, where the system forgets nothing."""
    return Peak(torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None, host_peak_bytes())


def host_peak_bytes() -> int:
    """The most that this process had resident since `restart_host_peak`."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def predicted_peaks(phases: Sequence[PhaseMemory], *, on_gpu: bool) -> dict[str, Peak]:
    """Of each span that has a prediction: that of its fullest phase. Without a device the host holds both parts."""
    peaks = {
        phase.name: Peak(phase.process_bytes, phase.host_bytes)
        if on_gpu
        else Peak(None, phase.process_bytes + phase.host_bytes)
        for phase in phases
    }
    found = {span: [peaks[name] for name in names if name in peaks] for span, names in PREDICTED.items()}
    return {span: reduce(Peak.merge, of_span) for span, of_span in found.items() if of_span}


def with_host_so_far(predicted: Mapping[str, Peak]) -> dict[str, Peak]:
    """The same where the host's peak never falls: of each span and those before it."""
    highest = accumulate((peak.host_bytes for peak in predicted.values()), max)
    return {span: Peak(peak.device_bytes, host) for (span, peak), host in zip(predicted.items(), highest, strict=True)}


def prediction_table(predicted: Mapping[str, Peak], scalars: Mapping[str, float]) -> str:
    """Predicted beside measured, for spans whose peaks are among a step's scalars."""
    rows = []
    for span, peak in predicted.items():
        both = [(size / _GIB, scalars[f"memory/{span}_{name}"]) for name, size in peak.by_metric.items()]
        rows.append([span, *(f"{gib:.2f}" for pair in both for gib in pair)])
    is_host_alone = len(rows[0]) == 3
    what = "resident on the host" if is_host_alone else "allocated by torch on the device, and resident on the host"
    head = ["phase", "predicted", "measured", "of the host", "measured"][: len(rows[0])]
    return "\n".join([f"peaks of the rank that needed most, GiB: {what}", *_aligned([head, *rows])])


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
