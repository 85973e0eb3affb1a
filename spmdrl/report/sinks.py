"""Sinks: metrics.jsonl in a tracker (wandb, trackio, mlflow, swanlab), or in a function of the user's.

Each sink has a process of its own next to the first rank. It reads metrics.jsonl as it grows, so that every number is
that of the file, and a tracker that hangs or raises costs the run a warning. `spmdrl sync RUN` sends afterwards what is
missing, also from another machine.

A tracker's run is continued where it was closed in order and the file still has the rows that it was sent. Elsewhere,
such as after a node has died, nobody knows which rows it has, or steps are computed again: the rows are sent to a new
run of the tracker, from the first one on, and the old run is deleted where it lies on this machine.
"""

from __future__ import annotations

import fcntl
import importlib.util
import math
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from spmdrl.config.base import Section
from spmdrl.config.read import read_table
from spmdrl.config.run import (
    FunctionSinkConfig,
    MlflowSinkConfig,
    SinksConfig,
)
from spmdrl.config.strict import shown
from spmdrl.faults.text import one_line, say
from spmdrl.report.files import MetricsRow, last_rows, read_rows
from spmdrl.types import UserError
from spmdrl.user_code import argument_problems, call, load

# Trackers, each behind the same four verbs: wandb, trackio, mlflow, swanlab, and a function of the user's.


class Sink(Protocol):
    """A tracker's run."""

    def start(self, run: str | None) -> str:
        """Continue a run, or begin a new one; returns its id."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send scalars of a step, whose other scalars may have been sent before."""
        ...

    def finish(self, step: int, samples: Sequence[MetricsRow], curves: Path | None) -> None:
        """Send the newest samples and a picture, where the tracker has a place for them, and close."""
        ...

    def discard(self, run: str) -> bool:
        """Delete a run that lies on this machine; False where it does not."""
        ...


def _new_id(name: str) -> str:
    return f"{name[:100]}-{secrets.token_hex(4)}"


class LibrarySink:
    """A tracker whose library makes a run by `init`; a run takes scalars, a picture and texts by `log`."""

    library: str
    _run: Any

    def __init__(self, cfg: Any, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._cfg, self._name, self._folder, self._settings = cfg, name, folder, settings

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, step: int, samples: Sequence[MetricsRow], curves: Path | None) -> None:
        """Send curves and samples in one call at this step, and close the run."""
        library = importlib.import_module(self.library)
        shown: dict[str, Any] = {"curves": library.Image(str(curves))} if curves else {}
        if samples:
            shown["samples"] = self._samples(library, samples)
        if shown:
            self._run.log(shown, step=step)
        self._run.finish()

    def _samples(self, library: Any, samples: Sequence[MetricsRow]) -> Any:
        """Return the samples as this tracker shows them."""
        raise NotImplementedError

    def _remove(self, pattern: str) -> bool:
        """Delete what the library has written of a run; True where that is all there is."""
        for path in self._folder.glob(pattern):
            shutil.rmtree(path)
        return bool(self._cfg.offline)


class WandbSink(LibrarySink):
    """Runs of Weights & Biases; offline ones lie in the folder."""

    library = "wandb"

    def start(self, run: str | None) -> str:
        """Continue the run of this id or make one, without its own console and system metrics."""
        import wandb

        id = run or _new_id(self._name)
        arguments = {"name": self._name, "config": dict(self._settings), "dir": str(self._folder)}
        arguments |= {"mode": "offline" if self._cfg.offline else "online", "resume": "allow"}
        arguments["settings"] = wandb.Settings(console="off", x_disable_stats=True, disable_git=True)
        self._run = wandb.init(id=id, project=self._cfg.project, **(arguments | self._cfg.params))
        return id

    def discard(self, run: str) -> bool:
        return self._remove(f"wandb/offline-run-*-{run}")

    def _samples(self, library: Any, samples: Sequence[MetricsRow]) -> Any:
        columns = list(dict.fromkeys(name for row in samples for name in row))
        return library.Table(columns=columns, data=[[str(row.get(name)) for name in columns] for row in samples])


class TrackioSink(LibrarySink):
    """Runs of trackio, whose ids are names."""

    library = "trackio"

    def start(self, run: str | None) -> str:
        """Continue the run of this name or make one, without its own GPU metrics."""
        import trackio

        id = run or _new_id(self._name)  # a run of trackio is known by its name
        arguments = {"config": dict(self._settings), "resume": "allow", "embed": False}
        arguments |= {"auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(self._cfg.project, name=id, **(arguments | self._cfg.params))
        return id

    def discard(self, run: str) -> bool:
        from trackio.sqlite_storage import SQLiteStorage

        is_here = not {"space_id", "server_url"} & self._cfg.params.keys()
        return is_here and bool(SQLiteStorage.delete_run(self._cfg.project, run))

    def _samples(self, library: Any, samples: Sequence[MetricsRow]) -> Any:
        return library.Markdown("\n\n---\n\n".join(_texts(samples)))  # its tables need pandas


class SwanlabSink(LibrarySink):
    """Runs of SwanLab; offline ones lie in the folder."""

    library = "swanlab"

    def start(self, run: str | None) -> str:
        """Continue the run of this id or make one; ids are 16 hexadecimal digits."""
        import swanlab

        id = run or secrets.token_hex(8)
        arguments = {"name": self._name, "config": dict(self._settings), "resume": "allow"}
        arguments |= {"mode": "offline" if self._cfg.offline else "online", "log_dir": str(self._folder / "swanlab")}
        self._run = swanlab.init(project=self._cfg.project, id=id, **(arguments | self._cfg.params))
        return id

    def discard(self, run: str) -> bool:
        return self._remove(f"swanlab/run-*-{run}")

    def _samples(self, library: Any, samples: Sequence[MetricsRow]) -> Any:
        return [library.Text(text) for text in _texts(samples)]


class MlflowSink:
    """Runs of MLflow: on a server, or in a database in the folder without `tracking_uri`."""

    def __init__(self, cfg: MlflowSinkConfig, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._name, self._settings, self._folder = name, settings, folder
        uri = cfg.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_here = uri is None
        self._client = MlflowClient(uri or f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self._project = cfg.project

    def start(self, run: str | None) -> str:
        """Continue the run of this id or make one, and its experiment if there is none."""
        if run is None:
            artifacts = (self._folder / "mlflow").resolve().as_uri() if self._is_here else None
            found = self._client.get_experiment_by_name(self._project)
            experiment = found.experiment_id if found else self._client.create_experiment(self._project, artifacts)
            run = self._client.create_run(experiment, run_name=self._name).info.run_id
            self._client.log_dict(run, dict(self._settings), "config.json")
        else:
            self._client.update_run(run, status="RUNNING")
        self._run = run
        return run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send a step's scalars in one request; characters that names may not have become `_`."""
        from mlflow.entities import Metric

        now = time.time_ns() // 10**6
        # The characters that names may have there.
        named = [(re.sub(r"[^\w\-. /]", "_", name), value) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in named])

    def finish(self, step: int, samples: Sequence[MetricsRow], curves: Path | None) -> None:
        if curves:
            self._client.log_artifact(self._run, str(curves))
        if samples:
            self._client.log_text(self._run, "\n\n".join(_texts(samples)), "samples.txt")
        self._client.set_terminated(self._run)

    def discard(self, run: str) -> bool:
        if self._is_here:
            self._client.delete_run(run)
        return self._is_here


class FunctionSink:
    """A function of the user's, called with `step`, `metrics` and `run` as far as it has such parameters."""

    def __init__(self, cfg: FunctionSinkConfig, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._cfg, self._name = cfg, name
        self._function = load(cfg.name)

    def start(self, run: str | None) -> str:
        self._run = run or _new_id(self._name)
        return self._run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        call(self._function, {"step": step, "metrics": dict(values), "run": self._run}, self._cfg.params)

    def finish(self, step: int, samples: Sequence[MetricsRow], curves: Path | None) -> None:
        pass

    def discard(self, run: str) -> bool:
        return False


KINDS: dict[str, Callable[[Any, str, Path, Mapping[str, Any]], Sink]] = {
    "wandb": WandbSink,
    "trackio": TrackioSink,
    "mlflow": MlflowSink,
    "swanlab": SwanlabSink,
    "function": FunctionSink,
}


def _texts(samples: Sequence[MetricsRow]) -> list[str]:
    return ["\n".join(f"{name}: {value}" for name, value in row.items()) for row in samples]


# The rows of a run, sent to them by processes of their own.


FLUSH_S = 20.0  # for the last rows, when the run has ended; a run that is killed leaves no process for longer
POLL_S = 0.5
MAX_NAMES = 1000  # of a run's scalars in a tracker
MAX_SAMPLES = 100  # rows of samples.jsonl that a tracker gets as a table


class _Sent(BaseModel):
    """A tracker's run, and the last row that it was sent."""

    run: str
    row: dict[str, float | None] = {}  # the last row, as far as it was sent; none before the first
    is_closed: bool = False  # in order: the tracker has all of it


class SinkFailed(Exception):
    """A tracker could not be reached, or raised."""


class Sender:
    """Sends the rows of a run's metrics.jsonl to one sink, each scalar once."""

    def __init__(self, run: Path, kind: str, cfg: Section, settings: Mapping[str, Any]) -> None:
        """Raises UserError when another process sends to the sink."""
        self._path, self._kind, self._folder = run, kind, run / "sinks"
        self._folder.mkdir(exist_ok=True)
        self._state = self._folder / f"{kind}.json"
        self._lock = (self._folder / f"{kind}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process sends {run} to {kind}; wait for its end") from None
        self._sink = KINDS[kind](cfg, run.resolve().name, self._folder, settings)
        self._names: set[str] = set()
        self._left_out: set[str] = set()

    def start(self) -> str | None:
        """Continue the tracker's run, or begin a new one; returns a sentence where that replaces an old one."""
        rows, before, replaced = read_rows(self._path / "metrics.jsonl"), self._read_state(), None
        if before is not None and not _continues(before, rows):
            is_gone = self._sink.discard(before.run)
            replaced = f"what run {before.run} was sent is not known, or was computed again: all steps go to a new run"
            replaced += "" if is_gone else f"; delete {before.run} there"
            before = None
        self._sent = before or _Sent(run="")
        self._names = {name for row in rows if row["step"] <= self._step for name in row}
        self._sent = self._sent.model_copy(
            update={"run": self._sink.start(before.run if before else None), "is_closed": False}
        )
        self._write_state()
        return replaced

    @property
    def _step(self) -> int:
        return int(self._sent.row.get("step") or 0) if self._sent.row else -1

    def send(self) -> None:
        """Send what the file has and the sink has not."""
        path = self._path / "metrics.jsonl"
        rows = last_rows(path, 50)
        if not rows or rows[0]["step"] > self._step:
            rows = read_rows(path)
        for row in rows:
            if row["step"] >= self._step:
                self._send_row(row)

    def _send_row(self, row: MetricsRow) -> None:
        sent = self._sent.row if row["step"] == self._step else {}
        new = {name: value for name, value in row.items() if name not in sent and name != "step"}
        for name in new.keys() - self._names:
            if len(self._names) >= MAX_NAMES:
                del new[name]
                self._left_out.add(name)
            else:
                self._names.add(name)
        if new:
            self._sink.log(row["step"], {name: math.nan if value is None else value for name, value in new.items()})
        self._sent = self._sent.model_copy(update={"row": sent | {"step": row["step"]} | new})

    def finish(self) -> str | None:
        """Send the rest and close the tracker's run; returns a sentence about scalars that were left out."""
        self.send()
        curves = self._path / "curves.png"
        samples = last_rows(self._path / "samples.jsonl", MAX_SAMPLES)
        self._sink.finish(max(0, self._step), samples, curves if curves.exists() else None)
        self._sent = self._sent.model_copy(update={"is_closed": True})
        self._write_state()
        left_out = f"{len(self._left_out)} scalars were left out: a sink gets {MAX_NAMES} names"
        return left_out if self._left_out else None

    def close(self) -> None:
        """Let another process send."""
        self._lock.close()

    def _read_state(self) -> _Sent | None:
        try:
            return _Sent.model_validate_json(self._state.read_bytes())
        except (OSError, ValueError):
            return None

    def _write_state(self) -> None:
        new = self._state.with_suffix(".new")
        new.write_text(self._sent.model_dump_json())
        new.replace(self._state)


def _continues(sent: _Sent, rows: Sequence[MetricsRow]) -> bool:
    """True when the tracker has exactly what it was sent, and the file still says the same."""
    if not sent.is_closed:
        return False
    same = next((row for row in rows if row["step"] == sent.row.get("step")), {})
    return sent.row.items() <= same.items()


def sinks_of(run: Path) -> tuple[dict[str, Section], dict[str, Any]]:
    """Return the sinks that a run's configuration names, by kind, and all of its settings. Raises UserError."""
    settings = read_table(str(run / "config.toml"))
    try:
        sinks = SinksConfig.model_validate(settings.get("report", {}).get("sinks", {}))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, ("report.sinks", *first["loc"])))
        raise UserError(f"{shown(run / 'config.toml')}: {at}: {first['msg'].lower()}") from error
    return sinks.by_kind, settings


def sink_problems(sinks: Mapping[str, Section]) -> Iterator[str]:
    """Yield a sentence for each tracker that is not installed, and for a function that cannot be called."""
    for kind, cfg in sinks.items():
        if isinstance(cfg, FunctionSinkConfig):
            try:
                sentences = [*argument_problems(load(cfg.name), ("step", "metrics", "run"), cfg.params)]
            except ValueError as error:
                sentences = [str(error)]
            yield from (f'report.sinks.function.name = "{cfg.name}": {sentence}' for sentence in sentences)
        elif (found := importlib.util.find_spec(kind)) is None or found.origin is None:  # or a folder of that name
            yield (
                f"report.sinks.{kind} is set, but {kind} is not installed: pip install 'spmdrl[{kind}]', or remove the "
                "table"
            )


class SinkProcesses:
    """The processes that send a run's metrics while it runs; they start with its first row."""

    def __init__(self, run: Path, kinds: Sequence[str]) -> None:
        self._run, self._kinds = run, kinds
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._has_started = False

    def _start(self) -> Iterator[str]:
        """Start the processes; yields a sentence for each that cannot be started."""
        self._has_started = True
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        for kind in self._kinds:
            command = [sys.executable, "-m", "spmdrl.report.sinks", str(self._run), kind]
            try:
                (self._run / "sinks").mkdir(exist_ok=True)
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
                )
            except OSError as error:  # no memory, no process, no disk: the run itself has what it needs
                yield (
                    f"report.sinks.{kind}: its process cannot be started ({error.strerror or error}); afterwards "
                    f"spmdrl sync {self._run} sends everything"
                )
                continue
            self._processes[kind] = process
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)

    def see(self) -> list[str]:
        """Notice that there are new rows; returns what the processes have reported since the last call."""
        problems = [] if self._has_started else [*self._start()]
        return problems + self._said()

    def _said(self) -> list[str]:
        found = []
        for kind, process in self._processes.items():
            assert process.stdout is not None
            said = process.stdout.read() or b""
            found += [f"report.sinks.{kind}: {line}" for line in said.decode(errors="replace").splitlines()]
        return found

    def close(self) -> list[str]:
        """Let them send the rest; returns what they have reported, and a sentence for each that did not finish."""
        for process in self._processes.values():
            assert process.stdin is not None
            process.stdin.close()
        end = time.monotonic() + FLUSH_S + 5.0
        late = []
        for kind, process in self._processes.items():
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                late.append(f"report.sinks.{kind}: not all was sent in time; `spmdrl sync {self._run}` sends the rest")
        found = [*self._said(), *late]
        self._processes = {}
        return found


def sync(
    run: Path, kind: str, cfg: Section, settings: Mapping[str, Any], *, until: Callable[[Sender], None]
) -> list[str]:
    """Send to one sink: first what is there, then what comes `until` that returns. Returns sentences for the user.

    Raises UserError when another process sends to it, and SinkFailed for whatever the tracker raises.
    """
    sender = None
    try:
        sender = Sender(run, kind, cfg, settings)
        replaced = sender.start()
        until(sender)
        return [sentence for sentence in (replaced, sender.finish()) if sentence]
    except UserError:
        raise
    except Exception as error:  # trackers and functions raise anything
        raise SinkFailed(
            f"{type(error).__name__}: {one_line(str(error))[:300]}; `spmdrl sync {run}` tries again"
        ) from error


def _follow(sender: Sender) -> None:
    """Send rows as they are written, until standard input ends with the run."""
    while not select.select([0], [], [], POLL_S)[0] or os.read(0, 100):
        sender.send()
    signal.setitimer(signal.ITIMER_REAL, FLUSH_S)  # whatever hangs then ends with the process


def main(argv: Sequence[str]) -> int:
    """Send a run's metrics to one sink while it runs; returns the exit code."""
    run, kind = Path(argv[0]), argv[1]
    sinks, settings = sinks_of(run)
    heard = os.fdopen(os.dup(1), "w")
    with (run / "sinks" / f"{kind}.log").open("a") as log:  # what the tracker's library prints
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    try:
        sentences = sync(run, kind, sinks[kind], settings, until=_follow)
    except (UserError, SinkFailed) as error:
        sentences = [str(error)]
    for sentence in sentences:
        say(sentence, heard)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
