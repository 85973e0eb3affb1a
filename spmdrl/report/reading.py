"""A run as its folder tells of it: read by programs beside the loop, while it runs or afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import read_table
from spmdrl.config.strict import read_json
from spmdrl.report.files import Row, read_scalars
from spmdrl.report.run_folder import RunFolder
from spmdrl.types import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run that was launched."""

    name: str
    rows: list[Row]  # of metrics.jsonl
    settings: Mapping[str, Any]  # by their whole names, such as `optim.lr`; {} where there is no config.toml
    num_steps: int | None  # None where there is no plan.json


def read_run(path: Path) -> RecordedRun:
    """Read a run's folder. Raises UserError when it holds no run, or a file that cannot be read."""
    folder = RunFolder(path)
    if not folder.holds_run():
        raise UserError(f"{path} is not the folder of a run: it has no config.toml and no metrics.jsonl")
    return RecordedRun(
        name=Path(os.path.realpath(path)).name,
        rows=read_scalars(folder.metrics),
        settings=read_settings(folder.config),
        num_steps=read_num_steps(folder.plan),
    )


def read_steps(path: Path) -> RecordedRun:
    """Read the folder of a run that has finished a step. Raises UserError as `read_run` does, and when it has not."""
    run = read_run(path)
    if not run.rows:
        raise UserError(f"{path} has no finished step to show: its metrics.jsonl is missing or empty")
    return run


def read_settings(config: Path) -> dict[str, Any]:
    """Read the settings of a config.toml by their whole names; none where the file is missing. Raises UserError."""
    if not config.exists():
        return {}
    try:
        return dict(_flat(read_table(str(config))))
    except UserError as error:
        raise UserError(f"{error}; the file is written again when the run is resumed") from error


def read_num_steps(plan: Path) -> int | None:
    """Read the steps that a run was launched for; None before its plan.json is whole."""
    try:
        steps = read_json(plan, dict[str, Any]).get("num_steps")
    except UserError:
        return None
    return steps if isinstance(steps, int) else None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings; a list of tables counts as one."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
