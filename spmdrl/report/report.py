"""`Report`: the training loop's only way to print, write and measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from types import TracebackType
from typing import Any

import torch

from spmdrl.algo.metrics import Max, Metrics, Total
from spmdrl.config import ReportConfig
from spmdrl.dist.session import return_freed_memory
from spmdrl.memory.phase import PhaseMemory
from spmdrl.report.console import Display, Progress, open_display
from spmdrl.report.files import MetricsFile, StepRowsFile, read_rows
from spmdrl.report.memory import (
    PREDICTED,
    Edge,
    Peak,
    edge_row,
    memory_table,
    predicted_peaks,
    prediction_table,
    read_peak,
    restart_host_peak,
    restart_peaks,
    with_host_so_far,
)
from spmdrl.report.run_folder import RunFolder
from spmdrl.report.sinks import SinkProcesses

# Time and memory of a step as metrics: the maximum over the ranks.


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
    ranks = "1 rank" if len(peaks_bytes) == 1 else f"{len(peaks_bytes)} ranks"
    return f"loaded on {ranks}; peak host memory, GiB: {peaks}"


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


_BETWEEN_SPANS = "between spans"


class Report:
    """Console, metrics.jsonl, samples.jsonl, eval_samples.jsonl, worst_tokens.jsonl, TensorBoard and curves of one run.

    Every rank has one and measures its phases with `span`. Only the one with `active=True` prints and writes; without a
    folder it only prints. `start_step` is the step of the checkpoint to resume from, None for a new run; rows that an
    earlier launch wrote for later steps are removed. `on_phase` is called with each phase as it begins.

    A number that is not finite is written to metrics.jsonl as null, because JSON cannot represent it.

    Close it, or use it in a `with` statement: a live display left open hides the terminal's cursor.
    """

    def __init__(
        self,
        cfg_report: ReportConfig,
        folder: RunFolder | None,
        *,
        num_steps: int,
        active: bool,
        start_step: int | None = None,
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._on_phase = on_phase
        self._times: dict[str, float] = {}
        self._peaks: dict[str, Peak] = {}
        self._predicted: dict[str, Peak] = {}  # for spans that have not been measured yet
        self._seen: dict[str, Peak] = {}  # predictions for spans that have been measured, and not been compared yet
        self._measured: dict[str, float] = {}
        self._has_steps = False
        self._host_peaks_fall = restart_host_peak()
        self._taken = time.perf_counter()
        self._folder = folder if active else None
        self._shows_memory = cfg_report.memory
        self._files = _Files(cfg_report, folder, start_step=start_step) if active and folder else None
        self._display: Display | None = None
        kinds = [*cfg_report.sinks.by_kind] if self._files else []
        self._sinks = SinkProcesses(folder.path, kinds) if kinds and folder else None
        if active:
            rows = self._files.metrics.rows_before if self._files else []
            progress = self._progress = Progress(num_steps=num_steps, start_step=start_step or 0, rows=rows)
            title = folder.path.name if folder else "spmdrl"
            self._display = open_display(cfg_report.console, progress, title=title)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure the wall time and the peak memory of a phase on this rank. Phases must not be nested."""
        self._on_phase(name)
        if self._display:
            self._display.begin_phase(name)
        self._keep_peak(_BETWEEN_SPANS)
        if name in self._predicted:
            return_freed_memory()  # or memory that an earlier phase freed would count for this one
        restart_peaks()
        began = time.perf_counter()
        yield
        # Without this, work that the phase has queued on the GPU would count for the next phase.
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._times[name] = self._times.get(name, 0.0) + time.perf_counter() - began
        self._keep_peak(name)

    def take_times(self) -> dict[str, float]:
        """Return this rank's seconds in each phase since the last call as `time/{name}_s`, and in all as `time/step_s`.

        What a step does after this call, such as saving, counts for the next step.
        """
        times, self._times = self._times, {}
        began, self._taken = self._taken, time.perf_counter()
        return {f"time/{name}_s": seconds for name, seconds in times.items()} | {"time/step_s": self._taken - began}

    def take_peaks(self) -> dict[str, Peak]:
        """Return this rank's peak memory in each phase since the last call, and between phases.

        What a step does after this call, such as saving, counts for the next step.
        """
        self._keep_peak(_BETWEEN_SPANS)
        peaks, self._peaks = self._peaks, {}
        return peaks

    def expect(self, phases: Sequence[PhaseMemory]) -> None:
        """Set the predicted memory of the phases; each is compared once with its measured peak: those of the first step
        above its line, later ones by `compare`."""
        predicted = predicted_peaks(phases, on_gpu=torch.cuda.is_initialized())
        self._predicted = predicted if self._host_peaks_fall else with_host_so_far(predicted)

    def compare(self, scalars: Mapping[str, float]) -> None:
        """Print predicted and measured peaks of the phases that were not printed yet, with those in `scalars`."""
        self._see_peaks(scalars)
        if self._seen:
            self.message(prediction_table(self._seen, self._measured))
        self._seen = {}

    def _see_peaks(self, scalars: Mapping[str, float]) -> None:
        """Remember the peaks of the phases that are measured for the first time."""
        for span in [span for span in self._predicted if f"memory/{span}_peak_gib" in scalars]:
            self._seen[span] = self._predicted.pop(span)
            self._measured |= {name: scalars[name] for name in scalars if name.startswith(f"memory/{span}_")}

    def step(
        self,
        step: int,
        scalars: Mapping[str, float],
        *,
        samples: Sequence[Mapping[str, Any]],
        histograms: Mapping[str, Sequence[float]],
        worst_tokens: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Show and write a finished step, with rows of its samples and of its worst tokens."""
        if self._files:
            self._files.step(step, scalars, samples, histograms, worst_tokens)
        if self._has_steps:  # a table among them would cut theirs in two
            self._see_peaks(scalars)
        else:
            self.compare(scalars)
        self._has_steps = True
        if self._display:
            self._display.end_step(step, scalars)
        for warning in self._sinks.see() if self._sinks else ():
            self.message(warning)

    def eval(self, step: int, scalars: Mapping[str, float], *, samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """Show and write an evaluation of the policy after `step`, with rows of answers; `step` itself may be reported
        before or after.

        The names are `eval/...`; in metrics.jsonl they are added to the row of the step. Step 0 is before training.
        """
        if self._files:
            self._files.eval(step, scalars, samples)
        if self._display:
            self._display.end_eval(step, scalars)

    def memory(self, step: int, edges: Sequence[Edge]) -> None:
        """Print and write the memory at each switch between trainer and engine, if `report.memory` is set."""
        if self._files:
            self._files.memory(step, edges)
        if self._shows_memory:
            self.message(memory_table(step, edges))

    def message(self, text: str) -> None:
        """Print a line, above the live display where there is one."""
        if self._display:
            self._display.message(text)

    def close(self) -> None:
        """Draw curves.png, print a summary of the run, and restore the terminal. A second call does nothing."""
        display, self._display = self._display, None
        if not display:
            return
        display.close()
        where = ""
        if self._files and self._folder:
            self._files.close()
            written = self._write_curves(self._folder)
            where = f"; {written} in {self._folder.path}"
            for warning in self._sinks.close() if self._sinks else ():
                display.message(warning)
        display.message(f"{self._progress.summary()}{where}")

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.close()
        except OSError:
            # A full disk that has no room for the picture must not hide the error that ended the run.
            if error is None:
                raise

    def _keep_peak(self, name: str) -> None:
        peak = read_peak()
        self._peaks[name] = self._peaks.get(name, peak).merge(peak)

    def _write_curves(self, folder: RunFolder) -> str:
        # Imported here because every rank imports this module, but only one draws.
        from spmdrl.report.curves import draw_curves

        rows = read_rows(folder.metrics)
        if not rows:
            return "no step was finished; an empty metrics.jsonl"
        draw_curves({folder.path.name: rows}, folder.curves)
        written = (folder.curves, folder.metrics, folder.samples)
        return ", ".join(path.name for path in written if path.exists())


class _Files:
    """The files that one run writes."""

    def __init__(self, cfg_report: ReportConfig, folder: RunFolder, *, start_step: int | None) -> None:
        last_step = -1 if start_step is None else start_step
        self.metrics = MetricsFile(folder.metrics, start_step=last_step)
        self._samples = StepRowsFile(folder.samples, start_step=last_step)
        self._eval_samples = StepRowsFile(folder.eval_samples, start_step=last_step)
        self._worst_tokens = StepRowsFile(folder.worst_tokens, start_step=last_step)
        self._memory = StepRowsFile(folder.memory, start_step=last_step) if cfg_report.memory else None
        self._tensorboard = None
        if cfg_report.tensorboard:
            # Imported here because every rank imports this module, but only one writes.
            from spmdrl.report.tensorboard import TensorBoard

            self._tensorboard = TensorBoard(folder.tensorboard, start_step=last_step)

    def step(
        self,
        step: int,
        scalars: Mapping[str, float],
        samples: Sequence[Mapping[str, Any]],
        histograms: Mapping[str, Sequence[float]],
        worst_tokens: Sequence[Mapping[str, Any]],
    ) -> None:
        self.metrics.write(step, scalars)
        self._samples.write(step, samples)
        self._worst_tokens.write(step, worst_tokens)
        if self._tensorboard:
            self._tensorboard.write_samples(step, samples)
            self._tensorboard.write_histograms(step, histograms)
            self._tensorboard.write(step, scalars)

    def eval(self, step: int, scalars: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        self._eval_samples.write(step, samples)
        self.metrics.write(step, scalars)
        if self._tensorboard:
            self._tensorboard.write(step, scalars)

    def memory(self, step: int, edges: Sequence[Edge]) -> None:
        if self._memory:
            self._memory.write(step, [edge_row(edge) for edge in edges])

    def close(self) -> None:
        self.metrics.close()
        if self._tensorboard:
            self._tensorboard.close()
