"""TensorBoard event files. The only module that imports TensorBoard."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from spmdrl.faults.text import printable
from spmdrl.report.series import GROUPS

# Of each group its charts; TensorBoard reads tags as regular expressions.
LAYOUT = {
    group: {chart.title: ["Multiline", [f"^{re.escape(name)}$" for name in chart.names]] for chart in charts}
    for group, charts in GROUPS.items()
} | {"Time": {"time of each phase, s": ["Multiline", ["^time/(?!step_s).*_s$"]]}}


class TensorBoard:
    """Writes scalars under their own names, histograms under `distribution/` and theirs, sample texts under `samples`,
    and the page `Custom scalars`. A tag is of one kind: TensorBoard shows no scalar that shares one with a histogram.

    `start_step` is the last finished step, -1 for a new run: TensorBoard hides what an earlier launch wrote for later
    steps.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        self._writer = SummaryWriter(str(path), purge_step=start_step + 1)
        self._writer.add_custom_scalars(LAYOUT)

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
                self._writer.add_histogram(f"distribution/{name}", np.array(finite), step)

    def close(self) -> None:
        self._writer.close()


def _as_markdown(sample: Mapping[str, Any]) -> str:
    values = [f"**{name}**{_as_code(value)}" for name, value in sample.items() if name != "turns"]
    turns = [_turn_as_markdown(number, turn) for number, turn in enumerate(sample.get("turns", ()), start=1)]
    return "\n\n".join([*values, *turns])


def _turn_as_markdown(number: int, turn: Mapping[str, Any]) -> str:
    """Format a turn of an episode: what the policy read and wrote, then what came of it."""
    facts = [
        f"{turn['tokens_read']} tokens read",
        f"{turn['tokens_written']} written",
        *([f"reward {turn['reward']:g}"] if turn["reward"] is not None else []),
        *([f"tool errors {turn['tool_errors']}"] if turn["tool_errors"] else []),
        *([] if turn["trained"] else ["not trained on"]),
    ]
    calls = [
        f"**calls** {_as_inline_code(call['name'])}{_as_code(json.dumps(call['arguments'], ensure_ascii=False))}"
        for call in turn["tool_calls"]
    ]
    return "\n\n".join(
        [
            f"#### Turn {number}: {', '.join(facts)}",
            f"**read**{_as_code(turn['read'])}",
            f"**wrote**{_as_code(turn['written'])}",
            *calls,
            *([f"**malformed call**{_as_code(turn['malformed'])}"] if turn["malformed"] else []),
            *(
                f"**metric** {_as_inline_code(name)} {value:g}"
                for name, value in sorted((turn["metrics"] or {}).items())
            ),
        ]
    )


def _as_code(value: Any) -> str:
    """Format text in a fence that the text itself cannot close, and other values inline."""
    text = printable(str(value))
    if not isinstance(value, str):
        return f" {text}"
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"\n\n{fence}\n{text}\n{fence}"


def _as_inline_code(text: str) -> str:
    """Format a name that the policy or an environment chose, in one line."""
    text = " ".join(printable(text).split())
    fence = "`" * (_longest_run(text) + 1)
    return f"{fence} {text} {fence}"


def _longest_run(text: str) -> int:
    """Length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
