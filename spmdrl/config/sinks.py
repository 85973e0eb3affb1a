"""Tables about sinks: the trackers that get a run's metrics besides its own files."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from spmdrl.config.base import Section

Project = Annotated[str, Field(min_length=1, max_length=200)]


class TrackioSinkConfig(Section):
    project: Project = "spmdrl"
    """The project that the run belongs to."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the tracker's `init`, such as `group`."""


class WandbSinkConfig(TrackioSinkConfig):
    offline: bool = False
    """Write to `sinks/` in the run's folder only, without a network; the tracker's own `sync` sends it later."""


class SwanlabSinkConfig(WandbSinkConfig):
    pass


class MlflowSinkConfig(Section):
    project: Project = "spmdrl"
    """The experiment that the run belongs to."""
    tracking_uri: str | None = None
    """The server or database. Unset: that of MLFLOW_TRACKING_URI, or else `sinks/mlflow.db` in the run's folder."""


class FunctionSinkConfig(Section):
    name: Annotated[str, Field(pattern=":")]
    """A function of yours, `package.module:function` or `path/file.py:function`. It is called with `step`, `metrics`
    (numbers by name, those of the step that it has not seen) and `run`, as far as it has such parameters."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for it."""


class SinksConfig(Section):
    """Trackers that get every number of metrics.jsonl; see `docs/seeing.md`. An empty table uses its defaults."""

    wandb: WandbSinkConfig | None = None
    """Send to Weights & Biases."""
    trackio: TrackioSinkConfig | None = None
    """Send to trackio, whose database is on this machine unless `params` name a `space_id`."""
    mlflow: MlflowSinkConfig | None = None
    """Send to MLflow."""
    swanlab: SwanlabSinkConfig | None = None
    """Send to SwanLab."""
    function: FunctionSinkConfig | None = None
    """Call a function."""

    @property
    def by_kind(self) -> dict[str, Section]:
        """The sinks that are set, by the names of their tables."""
        named = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: sink for name, sink in named.items() if sink is not None}
