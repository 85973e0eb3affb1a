"""Trackers, each behind the same four verbs: wandb, trackio, mlflow, swanlab, and a function of the user's."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spmdrl.config.run import (
    FunctionSinkConfig,
    MlflowSinkConfig,
    SwanlabSinkConfig,
    TrackioSinkConfig,
    WandbSinkConfig,
)
from spmdrl.report.files import Row
from spmdrl.user_code import call, load


class Sink(Protocol):
    """A tracker's run."""

    def start(self, run: str | None) -> str:
        """Continue a run, or begin a new one; returns its id."""
        ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send scalars of a step, whose other scalars may have been sent before."""
        ...

    def finish(self, step: int, samples: Sequence[Row], curves: Path | None) -> None:
        """Send the newest samples and a picture, where the tracker has a place for them, and close."""
        ...

    def discard(self, run: str) -> bool:
        """Delete a run that lies on this machine; False where it does not."""
        ...


def _new_id(name: str) -> str:
    return f"{name[:100]}-{secrets.token_hex(4)}"


class WandbSink:
    def __init__(self, cfg: WandbSinkConfig, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._cfg, self._name, self._folder, self._settings = cfg, name, folder, settings

    def start(self, run: str | None) -> str:
        import wandb

        id = run or _new_id(self._name)
        arguments = {"name": self._name, "config": dict(self._settings), "dir": str(self._folder)}
        arguments |= {"mode": "offline" if self._cfg.offline else "online", "resume": "allow"}
        arguments["settings"] = wandb.Settings(console="off", x_disable_stats=True, disable_git=True)
        self._run = wandb.init(id=id, project=self._cfg.project, **(arguments | self._cfg.params))
        return id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, step: int, samples: Sequence[Row], curves: Path | None) -> None:
        import wandb

        shown: dict[str, Any] = {"curves": wandb.Image(str(curves))} if curves else {}
        if samples:
            columns = list(dict.fromkeys(name for row in samples for name in row))
            cells = [[str(row.get(name)) for name in columns] for row in samples]
            shown["samples"] = wandb.Table(columns=columns, data=cells)
        self._run.log(shown, step=step)
        self._run.finish()

    def discard(self, run: str) -> bool:
        for path in self._folder.glob(f"wandb/offline-run-*-{run}"):
            shutil.rmtree(path)
        return self._cfg.offline


class TrackioSink:
    def __init__(self, cfg: TrackioSinkConfig, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._cfg, self._name, self._settings = cfg, name, settings

    def start(self, run: str | None) -> str:
        import trackio

        id = run or _new_id(self._name)  # a run of trackio is known by its name
        arguments = {"config": dict(self._settings), "resume": "allow", "embed": False}
        arguments |= {"auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(self._cfg.project, name=id, **(arguments | self._cfg.params))
        return id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, step: int, samples: Sequence[Row], curves: Path | None) -> None:
        import trackio

        shown: dict[str, Any] = {"curves": trackio.Image(str(curves))} if curves else {}
        if samples:
            shown["samples"] = trackio.Markdown("\n\n---\n\n".join(_texts(samples)))  # its tables need pandas
        if shown:
            self._run.log(shown, step=step)
        self._run.finish()

    def discard(self, run: str) -> bool:
        from trackio.sqlite_storage import SQLiteStorage

        is_here = not {"space_id", "server_url"} & self._cfg.params.keys()
        return is_here and bool(SQLiteStorage.delete_run(self._cfg.project, run))


class MlflowSink:
    def __init__(self, cfg: MlflowSinkConfig, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._name, self._settings, self._folder = name, settings, folder
        uri = cfg.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_here = uri is None
        self._client = MlflowClient(uri or f"sqlite:///{(folder / 'mlflow.db').resolve()}")
        self._project = cfg.project

    def start(self, run: str | None) -> str:
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
        from mlflow.entities import Metric

        now = time.time_ns() // 10**6
        # The characters that names may have there.
        named = [(re.sub(r"[^\w\-. /]", "_", name), value) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in named])

    def finish(self, step: int, samples: Sequence[Row], curves: Path | None) -> None:
        if curves:
            self._client.log_artifact(self._run, str(curves))
        if samples:
            self._client.log_text(self._run, "\n\n".join(_texts(samples)), "samples.txt")
        self._client.set_terminated(self._run)

    def discard(self, run: str) -> bool:
        if self._is_here:
            self._client.delete_run(run)
        return self._is_here


class SwanlabSink:
    def __init__(self, cfg: SwanlabSinkConfig, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._cfg, self._name, self._folder, self._settings = cfg, name, folder, settings

    def start(self, run: str | None) -> str:
        import swanlab

        id = run or secrets.token_hex(8)
        arguments = {"name": self._name, "config": dict(self._settings), "resume": "allow"}
        arguments |= {"mode": "offline" if self._cfg.offline else "online", "log_dir": str(self._folder / "swanlab")}
        self._run = swanlab.init(project=self._cfg.project, id=id, **(arguments | self._cfg.params))
        return id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, step: int, samples: Sequence[Row], curves: Path | None) -> None:
        import swanlab

        shown: dict[str, Any] = {"curves": swanlab.Image(str(curves))} if curves else {}
        if samples:
            shown["samples"] = [swanlab.Text(text) for text in _texts(samples)]
        if shown:
            self._run.log(shown, step=step)
        swanlab.finish()

    def discard(self, run: str) -> bool:
        for path in self._folder.glob(f"swanlab/run-*-{run}"):
            shutil.rmtree(path)
        return self._cfg.offline


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

    def finish(self, step: int, samples: Sequence[Row], curves: Path | None) -> None:
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


def _texts(samples: Sequence[Row]) -> list[str]:
    return ["\n".join(f"{name}: {value}" for name, value in row.items()) for row in samples]
