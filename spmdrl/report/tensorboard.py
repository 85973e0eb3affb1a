"""TensorBoard event files. The only module that imports TensorBoard."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Writes scalars and histograms under their own names, and sample texts under `samples`.

    `start_step` is the last finished step, -1 for a new run: TensorBoard hides what an earlier launch wrote for later
    steps.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        self._writer = SummaryWriter(str(path), purge_step=start_step + 1)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        # One event for all of them: handing one event per scalar to the writing thread costs milliseconds per step.
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)  # type: ignore[attr-defined]
        self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if samples:
            self._writer.add_text("samples", "\n\n---\n\n".join(map(_as_markdown, samples)), step)

    def write_histograms(self, step: int, histograms: Mapping[str, Sequence[float]]) -> None:
        """Write histograms without values that are not finite; an empty one is not written."""
        for name, values in histograms.items():
            finite = [value for value in values if math.isfinite(value)]
            if finite:
                self._writer.add_histogram(name, np.array(finite), step)

    def close(self) -> None:
        self._writer.close()


def _as_markdown(sample: Mapping[str, Any]) -> str:
    return "\n\n".join(f"**{name}**{_as_code(value)}" for name, value in sample.items())


def _as_code(value: Any) -> str:
    """Format text in a fence that the text itself cannot close, and other values inline."""
    text = str(value).encode("utf-8", "backslashreplace").decode("utf-8")
    if not isinstance(value, str):
        return f" {text}"
    longest_run = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest_run + 1)
    return f"\n\n{fence}\n{text}\n{fence}"
