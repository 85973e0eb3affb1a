"""Time and memory of a step as metrics: the maximum over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from spmdrl.algo.metrics import Max, Metrics, Total
from spmdrl.report.memory import PREDICTED, Peak

_GIB = 2**30


def time_metrics(times: dict[str, float]) -> Metrics:
    """Make metrics of the times of phases and of the step; the slowest rank counts."""
    return {name: Max(seconds) for name, seconds in times.items()}


def with_speed(scalars: dict[str, float]) -> dict[str, float]:
    """Add the loss tokens of all ranks per second of the step, without the time of evaluating and saving."""
    working = scalars["time/step_s"] - scalars.get("time/eval_s", 0.0) - scalars.get("time/save_s", 0.0)
    return scalars | {"speed/loss_tokens_per_s": scalars["batch/loss_tokens"] / working}


def drop_metrics(before: Mapping[str, int], after: Mapping[str, int]) -> Metrics:
    """Count the prompts dropped between two readings of `PromptStream.dropped`, by reason."""
    dropped = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    return {f"data/{reason}_count": Total(float(count)) for reason, count in dropped.items() if count}


def loading_line(peaks_bytes: Sequence[int]) -> str:
    """Format each rank's peak host memory for the console, once models and optimizers are loaded."""
    peaks = " ".join(f"{peak / _GIB:.2f}" for peak in peaks_bytes)
    return f"loaded on {len(peaks_bytes)} ranks; peak host memory, GiB: {peaks}"


def resource_metrics(peaks: Mapping[str, Peak]) -> Metrics:
    """Make metrics of the peaks from `Report.take_peaks`: of each phase with a prediction, and of the whole step."""
    phases: Metrics = {
        f"memory/{span}_{name}": Max(size / _GIB)
        for span in PREDICTED
        if span in peaks
        for name, size in peaks[span].by_metric.items()
    }
    every = reduce(Peak.merge, peaks.values())
    whole = {"host_peak_gib": every.host_bytes} | every.by_metric
    return phases | {f"memory/{name}": Max(size / _GIB) for name, size in whole.items()}
