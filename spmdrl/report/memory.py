"""Memory: readings of every rank when trainer and engine switch, peaks of each phase, and tables of both."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from spmdrl.memory.phase import PhaseMemory

_GIB = 2**30
_COLUMNS = ("free", "reserved", "allocated", "host", "pinned")

# The spans of a run in the order in which they first occur, and the predicted phases that each contains.
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
    """One rank's memory at one moment; device numbers are 0 on a CPU."""

    total_bytes: int = 0  # of the device
    free_bytes: int = 0  # on the device, for any process
    reserved_bytes: int = 0  # by torch's allocator in this process
    allocated_bytes: int = 0  # the part of reserved that tensors use
    host_bytes: int  # resident set of this process
    pinned_bytes: int = 0  # page-locked host memory of this process


@dataclass(frozen=True, slots=True)
class Edge:
    """A switch between trainer and engine, and each rank's memory after it."""

    name: str
    seconds: float
    readings: tuple[MemoryReading, ...]  # in the order of the ranks


def read_memory(device: torch.device) -> MemoryReading:
    """Read this rank's current memory."""
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
    """Return this process's resident host memory, or its peak on systems that only report that."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory of this process during some time."""

    device_bytes: int | None  # allocated by torch on this rank's device; None where there is no device
    host_bytes: int  # resident

    @property
    def by_metric(self) -> dict[str, int]:
        """Bytes by the last part of the metric's name; `peak_gib` is the host's memory where there is no device."""
        if self.device_bytes is None:
            return {"peak_gib": self.host_bytes}
        return {"peak_gib": self.device_bytes, "host_peak_gib": self.host_bytes}

    def merge(self, other: Peak) -> Peak:
        """Return the peak during both times."""
        host_bytes = max(self.host_bytes, other.host_bytes)
        if self.device_bytes is None or other.device_bytes is None:
            return Peak(None, host_bytes)
        return Peak(max(self.device_bytes, other.device_bytes), host_bytes)


def restart_peaks() -> None:
    """Reset the peaks: from here on `read_peak` reports what follows."""
    restart_host_peak()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def restart_host_peak() -> bool:
    """Reset the kernel's record of this process's peak resident memory; False if the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def read_peak() -> Peak:
    """Return the peak since `restart_peaks`; on a host that cannot reset it, the peak since the process began."""
    return Peak(torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None, host_peak_bytes())


def host_peak_bytes() -> int:
    """Return this process's peak resident memory since `restart_host_peak`."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def predicted_peaks(phases: Sequence[PhaseMemory], *, on_gpu: bool) -> dict[str, Peak]:
    """Return the predicted peak of each span: its largest phase. Without a device, all memory is host memory.

    On a device torch allocates workspaces for cuBLAS at the first product, which comes after a model is loaded.
    """
    peaks = {
        phase.name: Peak(
            phase.process_bytes + (phase.elsewhere.get("cuBLAS", 0) if phase.name != "load" else 0), phase.host_bytes
        )
        if on_gpu
        else Peak(None, phase.process_bytes + phase.host_bytes)
        for phase in phases
    }
    by_span = {span: [peaks[name] for name in names if name in peaks] for span, names in PREDICTED.items()}
    return {span: reduce(Peak.merge, of_span) for span, of_span in by_span.items() if of_span}


def with_host_so_far(predicted: Mapping[str, Peak]) -> dict[str, Peak]:
    """Raise each predicted host peak to the largest so far, for systems on which the measured peak never falls."""
    highest = accumulate((peak.host_bytes for peak in predicted.values()), max)
    return {span: Peak(peak.device_bytes, host) for (span, peak), host in zip(predicted.items(), highest, strict=True)}


def prediction_table(predicted: Mapping[str, Peak], scalars: Mapping[str, float]) -> str:
    """Format a table of predicted and measured peaks, for spans whose peaks are among a step's scalars."""
    rows = []
    for span, peak in predicted.items():
        both = [(size / _GIB, scalars[f"memory/{span}_{name}"]) for name, size in peak.by_metric.items()]
        rows.append([span, *(f"{gib:.2f}" for pair in both for gib in pair)])
    host_only = len(rows[0]) == 3
    what = "host memory" if host_only else "device memory allocated by torch, then host memory"
    head = ["phase", "predicted", "measured", "host predicted", "host measured"][: len(rows[0])]
    return "\n".join([f"peak memory of the rank that used most, GiB: {what}", *_aligned([head, *rows])])


def edge_row(edge: Edge) -> dict[str, Any]:
    """Make a row of memory.jsonl: each column is a list of every rank's GiB."""
    columns = {f"{column}_gib": [round(size, 4) for size in _column(edge, column)] for column in _COLUMNS}
    return {"edge": edge.name, "seconds": round(edge.seconds, 4)} | columns


def memory_table(step: int, edges: Sequence[Edge]) -> str:
    """Format a table with one line per switch: the range over the ranks. Columns of zeros are left out."""
    if not edges:
        return ""
    num_ranks = len(edges[0].readings)
    shown = [column for column in _COLUMNS if any(size for edge in edges for size in _column(edge, column))]
    head = ["edge", "s", *shown]
    rows = [[edge.name, f"{edge.seconds:.2f}", *(_range(_column(edge, name)) for name in shown)] for edge in edges]
    return "\n".join([f"memory in step {step}, GiB, on {num_ranks} ranks", *_aligned([head, *rows])])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad the cells of a table: names are left-aligned, numbers right-aligned."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    names = [cell.ljust(widths[0]) for cell in columns[0]]
    numbers = [[cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)]
    return ["  " + "  ".join(cells) for cells in zip(names, *numbers, strict=True)]


def _column(edge: Edge, column: str) -> list[float]:
    """Return one column of every rank's reading, in GiB."""
    return [getattr(reading, f"{column}_bytes") / _GIB for reading in edge.readings]


def _range(sizes: Sequence[float]) -> str:
    low, high = f"{min(sizes):.2f}", f"{max(sizes):.2f}"
    return low if low == high else f"{low}-{high}"
