"""Time and memory of a step, as metrics: what matters is the rank that needed most."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence

from spmdrl.metrics import Max, Metrics, Total
from spmdrl.report.memory import PREDICTED

_GIB = 2**30


def time_metrics(times: dict[str, float]) -> Metrics:
    """Seconds of each phase on the slowest rank, and of the step."""
    return {name: Max(seconds) for name, seconds in times.items()}


def with_speed(scalars: dict[str, float]) -> dict[str, float]:
    """Add the loss tokens of all ranks per second of the step; evaluating and saving are not part of that time."""
    working = scalars["time/step_s"] - scalars.get("time/eval_s", 0.0) - scalars.get("time/save_s", 0.0)
    return scalars | {"speed/loss_tokens_per_s": scalars["pack/loss_tokens"] / working}


def drop_metrics(before: Mapping[str, int], after: Mapping[str, int]) -> Metrics:
    """Prompts that were passed over between two readings of `PromptStream.dropped`, by reason."""
    passed_over = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    return {f"data/{reason}_count": Total(float(count)) for reason, count in passed_over.items() if count}


def host_peak_gib() -> float:
    """The most host memory this process has had resident since its start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB


def loading_line(peaks_gib: Sequence[float]) -> str:
    """For the console, once models and optimizer are loaded: each rank's peak host memory."""
    return f"loaded on {len(peaks_gib)} ranks; peak host memory, GiB: {' '.join(f'{peak:.2f}' for peak in peaks_gib)}"


def resource_metrics(peaks: Mapping[str, int]) -> Metrics:
    """Peak memory in each phase that has a prediction, and in all of `peaks`, which `Report.take_peaks` gave."""
    phases: Metrics = {f"memory/{name}_peak_gib": Max(peaks[name] / _GIB) for name in PREDICTED if name in peaks}
    total = max(peaks.values(), default=0) / _GIB
    return phases | {"memory/peak_gib": Max(total), "memory/host_peak_gib": Max(host_peak_gib())}
