"""Time and memory of a step, as metrics: what matters is the rank that needed most."""

from __future__ import annotations

import resource

import torch

from spmdrl.metrics import Max, Metrics

_GIB = 2**30


def time_metrics(times: dict[str, float]) -> Metrics:
    """Seconds of each phase on the slowest rank, and of the step."""
    return {**{name: Max(seconds) for name, seconds in times.items()}, "time/step_s": Max(sum(times.values()))}


def with_speed(scalars: dict[str, float]) -> dict[str, float]:
    """Add the loss tokens of all ranks per second of the step; evaluating and saving are not part of that time."""
    working = scalars["time/step_s"] - scalars.get("time/eval_s", 0.0) - scalars.get("time/save_s", 0.0)
    return scalars | {"speed/loss_tokens_per_s": scalars["pack/loss_tokens"] / working}


def resource_metrics(device: torch.device) -> Metrics:
    """Peak memory since the last step: of the device where it has its own, else of the process since its start."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _GIB
    peak = host
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / _GIB
        torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak_gib": Max(peak), "memory/host_peak_gib": Max(host)}
