"""Metrics that are still on the device: many are fetched at once, so that the host waits once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from spmdrl.algo.metrics import Metric, Metrics


@dataclass(frozen=True, slots=True)
class Deferred:
    """A metric and the numbers it is made of; float64 holds those of float32, and integers below 2^53, exactly."""

    numbers: Tensor  # of any shape
    of: Callable[[list[float]], Metric]  # makes the metric from the numbers, flattened


def fetched(parts: list[dict[str, Deferred]]) -> list[Metrics]:
    """Copy all numbers to the host in one transfer, for which it waits, and make the metrics."""
    every = [metric.numbers.double().flatten() for part in parts for metric in part.values()]
    numbers = iter(torch.cat(every).tolist() if every else [])
    return [
        {name: metric.of(list(islice(numbers, metric.numbers.numel()))) for name, metric in part.items()}
        for part in parts
    ]
