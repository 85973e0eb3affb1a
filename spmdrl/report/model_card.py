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
# Of no use to a reader of the card: what says where a run was, and not what it learned.
_ASIDE = ("run.dir", "report.", "watchdog.", "checkpoint.", "resume.", "debug.", "reward.sandbox.", "rollout.sglang")
_PRIVATE = {"url", "command", "python", "image_root", "api_key_variable", "sandbox"}
_HUB = "hf:"
_ADDRESS = re.compile(r"\w+://\S*")
_LEFT_OUT = "Left out: addresses, commands, keys' names, folders, and what says where the run was."


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
    lines += ["## Settings", "", _LEFT_OUT, "", "```toml", *_settings(settings), "```", ""]
    return "\n".join(lines)


def _published(path: str) -> str:
    """Return a path as others can read it: the name and commit of what a hub has, or the last part of a path here."""
    if (match := _CACHED.fullmatch(path)) is not None:
        owner, name, commit, file = match.groups()
        return f"{owner}/{name}@{commit}" + (f":{file}" if file else "")
    if path.startswith(_HUB):
        return path
    parts = Path(path).parts
    return "/".join(parts[-2:] if parts[-1:] == ("hf",) else parts[-1:])  # a run's model has its run's name


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
        if not name.startswith(_ASIDE) and not _PRIVATE.intersection(name.split(".")) and not _is_address(value):
            key = name.rpartition(".")[2]
            yield f"{name} = {json.dumps(_without_places(key, value), ensure_ascii=False, default=str)}"


def _without_places(key: str, value: Any) -> Any:
    """Return a setting's value without addresses and folders."""
    if isinstance(value, str):
        is_place = key in ("path", "function", "name", "env") or re.fullmatch(r"(/|~|\.\.)\S*", value)
        return _published(value) if is_place else value
    if isinstance(value, Mapping):
        said = {name: one for name, one in value.items() if name not in _PRIVATE and not _is_address(one)}
        return {name: _without_places(name, one) for name, one in said.items()}
    return [_without_places(key, one) for one in value] if isinstance(value, list | tuple) else value


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and _ADDRESS.fullmatch(value) is not None
