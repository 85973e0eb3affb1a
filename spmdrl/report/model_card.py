"""A model card for a run's model, written from the run's folder: data, settings, evaluations, versions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from spmdrl.config.strict import read_json
from spmdrl.report.console import format_number
from spmdrl.report.run_folder import RunFolder, read_steps
from spmdrl.report.series import History

_CACHED = re.compile(r".*/(?:models|datasets)--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{7,})(?:/(.*))?")
_SHOWN = ("eval/accuracy", "eval/reward", "eval/loss", "reward/mean", "update/loss")
_VERSIONS = ("spmdrl", "git_commit", "torch", "transformers", "cuda_devices")
_ASIDE = ("run.dir", "report.", "watchdog.", "checkpoint.", "resume.", "debug.")  # of no use to a reader of the card


def model_card(run: Path, *, step: int) -> str:
    """Return the README.md of the model that a run had after `step`. Raises UserError where it has no steps."""
    recorded, folder = read_steps(run), RunFolder(run)
    settings = recorded.settings
    base = _published(str(settings.get("model.path", "")))
    head = {"library_name": "transformers", "tags": ["spmdrl", "reinforcement-learning"]}
    name, _, revision = base.partition("@")
    if revision:
        head["base_model"] = name
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
    lines += [f"# {recorded.name}", "", f"`{base}` after {step} steps of training with spmdrl.", ""]
    lines += ["## Data", "", *_data(settings.get("data.sources", ())), "", "## Results", ""]
    lines += [*_results(History([row for row in recorded.rows if row["step"] <= step])), ""]
    versions = read_json(folder.versions, dict[str, Any]) if folder.versions.is_file() else {}
    lines += ["## Made with", "", *(f"- {one}: {versions[one]}" for one in _VERSIONS if versions.get(one)), ""]
    lines += ["## Settings", "", "```toml", *_settings(settings), "```", ""]
    return "\n".join(lines)


def _published(path: str) -> str:
    """Return a path as others can read it: the name and commit of what a hub has, or the last part of a path here."""
    if (match := _CACHED.fullmatch(path)) is not None:
        owner, name, commit, file = match.groups()
        return f"{owner}/{name}@{commit}" + (f":{file}" if file else "")
    return Path(path).name if path.startswith("/") else path


def _data(sources: Any) -> Iterator[str]:
    for source in TypeAdapter(list[dict[str, Any]]).validate_python(list(sources)):
        yield f"- {_published(str(source.get('path', source.get('task', ''))))} ({source.get('kind', 'unknown')})"


def _results(history: History) -> Iterator[str]:
    """Yield a table of what was measured first and last."""
    yield from ("| | first | last |", "|---|---|---|")
    low, high = history["eval/ci95_low"].values, history["eval/ci95_high"].values
    for name in _SHOWN:
        known = history[name].finite()
        if not len(known):
            continue
        interval = ""
        if name == "eval/accuracy" and len(low) and len(high):
            interval = f" ({format_number(low[-1])} to {format_number(high[-1])})"
        first, last = format_number(known.values[0]), format_number(known.values[-1])
        yield f"| {name} | {first} at step {known.steps[0]} | {last}{interval} at step {known.steps[-1]} |"


def _settings(settings: Mapping[str, Any]) -> Iterator[str]:
    for name, value in settings.items():
        if not name.startswith(_ASIDE):
            yield f"{name} = {json.dumps(_without_paths(value), ensure_ascii=False, default=str)}"


def _without_paths(value: Any) -> Any:
    if isinstance(value, str):
        return _published(value)
    if isinstance(value, Mapping):
        return {key: _without_paths(one) for key, one in value.items()}
    return [_without_paths(one) for one in value] if isinstance(value, list | tuple) else value
