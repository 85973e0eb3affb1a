"""Console output: a live display on a terminal, one line per step elsewhere."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import time
import typing
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spmdrl.faults.text import one_line, printable, say, silence

STEPS_BEHIND_ETA = 20
REFRESHES_PER_S = 2
SIDE_BY_SIDE_WIDTH = 104
SHOWN_S = 0.005  # a shorter phase would be shown as 0.00
BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Shown:
    """A scalar that the console shows."""

    name: str
    label: str  # on the live display
    short: str  # in the line of a step


SHOWN = (
    Shown("reward/mean", "reward", "reward"),
    Shown("eval/accuracy", "eval accuracy", "eval"),
    Shown("eval/loss", "eval loss", "eval loss"),
    Shown("update/loss", "loss", "loss"),
    Shown("pairs/accuracy", "accuracy of pairs", "accuracy"),
    Shown("pairs/margin", "margin of pairs", "margin"),
    Shown("critic/explained_variance", "explained variance", "explained"),
    Shown("rollout/response_tokens", "response tokens", "tokens"),
    Shown("rollout/truncated_fraction", "truncated fraction", "truncated"),
    Shown("update/entropy_nats", "entropy, nats", "entropy"),
    Shown("mismatch/max_abs_nats", "max mismatch, nats", "mismatch"),
    Shown("update/grad_norm", "gradient norm", "grad_norm"),
    Shown("speed/loss_tokens_per_s", "loss tokens per s", "tokens/s"),
)


class Progress:
    """Progress of the run and history of its shown scalars; `rows` are those of earlier launches."""

    def __init__(
        self,
        *,
        num_steps: int,
        start_step: int,
        rows: Iterable[Mapping[str, Any]] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_steps = num_steps
        self.start_step = start_step
        self.step = start_step
        self.clock = clock
        self.started = clock()
        self.phase: tuple[str, float] | None = None  # name, and when it began
        # Replaced, never modified in place: the live display reads them from another thread.
        self.phases_seen: tuple[str, ...] = ()
        self.phase_times: dict[str, float] = {}
        self._history: dict[str, list[float]] = {shown.name: [] for shown in SHOWN}
        self._step_ends = deque([self.started], maxlen=STEPS_BEHIND_ETA + 1)
        for row in rows:
            self._remember(row)

    def begin_phase(self, name: str) -> None:
        self.phase = (name, self.clock())
        self._see_phases([name])

    def end_step(self, step: int, scalars: Mapping[str, float]) -> None:
        self.step = step
        self.phase_times = phase_times(scalars)
        self._see_phases(self.phase_times)
        self._step_ends.append(self.clock())
        self._remember(scalars)

    def end_eval(self, scalars: Mapping[str, float]) -> None:
        self._remember(scalars)

    def history(self) -> list[tuple[Shown, list[float]]]:
        """Return the values of every scalar measured so far, in the order in which they are shown."""
        known = {name for name, values in self._history.items() if values}
        # In RL the loss stays near zero and says little; it is shown only where there is no reward.
        hidden = {"update/loss"} if "reward/mean" in known else set()
        return [(shown, self._history[shown.name]) for shown in SHOWN if shown.name in known - hidden]

    def elapsed_s(self) -> float:
        """Return the time since this launch began."""
        return self.clock() - self.started

    def left_s(self) -> float | None:
        """Estimate the time to the end from the last steps, with evaluations and saves; None before the first step."""
        paced = len(self._step_ends) - 1
        if not paced:
            return None
        step_s = (self._step_ends[-1] - self._step_ends[0]) / paced
        return max(0.0, step_s * (self.num_steps - self.step) - (self.clock() - self._step_ends[-1]))

    def summary(self) -> str:
        """Summarize the whole run in one line."""
        changes = [
            f"{shown.label} {' -> '.join(format_number(value) for value in _ends(values))}"
            for shown, values in self.history()
            if shown.name in ("reward/mean", "eval/accuracy", "eval/loss", "update/loss")
        ]
        done = f"step {self.step} of {self.num_steps} in {format_duration(self.elapsed_s())}"
        return "; ".join([done, *changes])

    def _see_phases(self, names: Iterable[str]) -> None:
        self.phases_seen = tuple(dict.fromkeys([*self.phases_seen, *names]))

    def _remember(self, scalars: Mapping[str, Any]) -> None:
        for name, values in self._history.items():
            if name in scalars:
                values.append(math.nan if scalars[name] is None else scalars[name])


class Display(Protocol):
    """The console output of a run."""

    def begin_phase(self, name: str) -> None: ...
    def end_step(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def end_eval(self, step: int, scalars: Mapping[str, float]) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


def open_display(mode: Literal["auto", "live", "plain"], progress: Progress, *, title: str) -> Display:
    """Open a live display if the terminal supports one or `mode` is "live", plain lines otherwise."""
    encoding = (sys.stdout.encoding or "").lower()
    can_draw = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and encoding.startswith("utf")
    if mode == "live" or (mode == "auto" and can_draw):
        stream = typing.cast(TextIO, Unbreakable(sys.stdout))
        return LiveDisplay(progress, title=title, console=Console(force_terminal=True, file=stream))
    return PlainLines(progress, sys.stdout)


class Unbreakable:
    """A stream whose run continues where nothing takes what is printed, such as on a terminal that was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._errors = sys.stderr  # as it is before a live display makes it its own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or throw it away."""
        try:
            return self._stream.write(text)
        except OSError as error:
            _give_up(self._stream, error, self._errors)
            return len(text)

    def flush(self) -> None:
        """Print what was written, or throw it away."""
        try:
            self._stream.flush()
        except OSError as error:
            _give_up(self._stream, error, self._errors)


def _give_up(stream: TextIO, error: OSError, errors: TextIO) -> None:
    """Throw away all that is printed from now on, and tell it if anybody is left."""
    silence(stream)
    with contextlib.suppress(OSError):
        say(f"nothing more is printed ({error.strerror}); the run continues: see metrics.jsonl", errors)


class PlainLines:
    """Prints one line per step."""

    def __init__(self, progress: Progress, stream: TextIO) -> None:
        self._progress = progress
        self._stream = stream

    def begin_phase(self, name: str) -> None:
        pass

    def end_step(self, step: int, scalars: Mapping[str, float]) -> None:
        self._progress.end_step(step, scalars)
        self.message(step_line(self._progress, scalars))

    def end_eval(self, step: int, scalars: Mapping[str, float]) -> None:
        self._progress.end_eval(scalars)
        self.message(
            "  ".join([f"eval after step {step}", *itertools.starmap(_pair, _without_only_task(scalars).items())])
        )

    def message(self, text: str) -> None:
        try:
            say(text, self._stream)
        except OSError as error:
            _give_up(self._stream, error, sys.stderr)

    def close(self) -> None:
        pass


def _without_only_task(scalars: Mapping[str, float]) -> Mapping[str, float]:
    """Leave out the accuracy of the only task, which is that of the whole evaluation."""
    of_tasks = [name for name in scalars if name.startswith("eval/accuracy_")]
    return {name: value for name, value in scalars.items() if len(of_tasks) > 1 or name not in of_tasks}


def step_line(progress: Progress, scalars: Mapping[str, float]) -> str:
    """Format the scalars and phase times of a step as one line."""
    width = len(str(progress.num_steps))
    shown = [_pair(one.short, scalars[one.name]) for one, _ in progress.history() if one.name in scalars]
    times = [f"{phase} {seconds:.2f}s" for phase, seconds in progress.phase_times.items() if seconds >= SHOWN_S]
    left = f"left {format_duration(progress.left_s())}"
    return "  ".join([f"step {progress.step:>{width}}/{progress.num_steps}", *shown, *times, left])


class LiveDisplay:
    """Shows progress, the trend of each scalar and the time of each phase, redrawn in place."""

    def __init__(self, progress: Progress, *, title: str, console: Console) -> None:
        self._progress = progress
        self._title = one_line(title)
        self._live = Live(self, console=console, refresh_per_second=REFRESHES_PER_S)
        self._live.start()

    def begin_phase(self, name: str) -> None:
        self._progress.begin_phase(name)

    def end_step(self, step: int, scalars: Mapping[str, float]) -> None:
        self._progress.end_step(step, scalars)

    def end_eval(self, step: int, scalars: Mapping[str, float]) -> None:
        self._progress.end_eval(scalars)

    def message(self, text: str) -> None:
        self._live.console.print(printable(text), markup=False, highlight=False)

    def close(self) -> None:
        self._progress.phase = None
        self._live.stop()

    def __rich__(self) -> RenderableType:
        return draw(self._progress, title=self._title, width=self._live.console.width)


def draw(progress: Progress, *, title: str, width: int) -> RenderableType:
    """Draw the live display as of now. It is called from another thread, so it only reads `progress`."""
    parts: list[RenderableType] = [_headline(progress, title), Text()]
    if width >= SIDE_BY_SIDE_WIDTH:
        both = Table.grid(padding=(0, 4, 0, 0))
        both.add_row(_numbers_table(progress, trend_width=min(40, width - 88)), _phases_table(progress))
        parts.append(both)
    else:
        numbers = _numbers_table(progress, trend_width=min(40, max(8, width - 50)))
        parts += [numbers, Text(), _phases_table(progress)]
    return Padding(Group(*parts), (1, 1))


def _headline(progress: Progress, title: str) -> RenderableType:
    line = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for ratio in (None, None, 1, None, None):
        line.add_column(ratio=ratio, no_wrap=True)
    line.add_row(
        Text(title, style="bold"),
        Text.assemble("step ", (str(progress.step), "bold"), f"/{progress.num_steps}"),
        ProgressBar(total=max(1, progress.num_steps), completed=progress.step),
        Text(f"{format_duration(progress.elapsed_s())} so far", style="dim"),
        Text(f"{format_duration(progress.left_s())} left"),
    )
    return line


def _numbers_table(progress: Progress, *, trend_width: int) -> Table:
    table = _table("", "first", "now", "trend", numeric=("first", "now"))
    for shown, values in progress.history():
        prominent = shown.name in ("reward/mean", "eval/accuracy")
        table.add_row(
            Text(shown.label, style="bold" if prominent else ""),
            Text(format_number(values[0]), style="dim"),
            Text(format_number(values[-1]), style="bold green" if prominent else ""),
            Text(sparkline(values, trend_width), style="green" if prominent else "cyan"),
        )
    return table


def _phases_table(progress: Progress) -> Table:
    table = _table("phase", "s", "share", numeric=("s",))
    phase, began = progress.phase or (None, 0.0)
    times = progress.phase_times
    step_s = sum(times.values())
    for name in progress.phases_seen:
        running = name == phase
        seconds = progress.clock() - began if running else times.get(name)
        table.add_row(
            Text(f"{'▸' if running else ' '} {name}", style="bold yellow" if running else ""),
            Text("" if seconds is None else f"{seconds:.2f}", style="yellow" if running else ""),
            Text("━" * round(12 * times[name] / step_s) if times.get(name) else "", style="magenta"),
        )
    return table


def _table(*columns: str, numeric: tuple[str, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", no_wrap=True)
    return table


def _ends(values: list[float]) -> list[float]:
    """The first and the last value; only one where there is no other."""
    return [values[0], values[-1]] if len(values) > 1 else values


def phase_times(scalars: Mapping[str, float | None]) -> dict[str, float]:
    """Return seconds by phase from the scalars `time/{phase}_s` that are numbers, without that of the whole step."""
    times = {name: value for name, value in scalars.items() if name.startswith("time/") and name != "time/step_s"}
    return {name.removeprefix("time/").removesuffix("_s"): value for name, value in times.items() if value is not None}


def sparkline(values: list[float], width: int) -> str:
    """Draw the values from first to last as bars, averaged to at most `width` characters."""
    count = min(width, len(values))
    edges = [len(values) * place // count for place in range(count + 1)] if count else []
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low or 1.0
    return "".join(BARS[round((mean - low) / span * 7)] if math.isfinite(mean) else " " for mean in means)


def format_number(value: float) -> str:
    """Format a number with about three significant digits."""
    size = abs(value)
    if not math.isfinite(value) or size == 0.0:
        return f"{value:.0f}"
    if size >= 1e6:
        return f"{value / 1e6:.2f}M"
    if size >= 1e4:
        return f"{value / 1e3:.1f}k"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def format_duration(seconds: float | None) -> str:
    """Format as h:mm:ss, or m:ss under an hour; dashes if unknown or not finite."""
    if seconds is None or not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _pair(name: str, value: float) -> str:
    return f"{one_line(name)} {format_number(value)}"
