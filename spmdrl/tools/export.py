"""`python -m spmdrl.tools.export RUN [--step N] [--to DIR]`: a checkpoint of a run as a Hugging Face directory, or its
adapters alone as a PEFT directory.

It needs no GPU, and no memory for the optimizer. With several ranks, `torchrun --nproc-per-node N -m
spmdrl.tools.export RUN`, each holds a part of the model and writes some of its files.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter
from transformers.utils import logging as transformers_logging

from spmdrl.checkpoint.manifest import folder_of, saved_steps
from spmdrl.checkpoint.resume import require_whole, restore_weights
from spmdrl.config import Config, ParallelConfig, TuningConfig, read_run_config
from spmdrl.config.base import NonNegativeInt
from spmdrl.config.strict import read_json, shown
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.faults.text import Parser, say
from spmdrl.learn.learner import POLICY
from spmdrl.model.load import DTYPES, load_model_config
from spmdrl.preflight.hub import require_writable, send
from spmdrl.report.console import format_number
from spmdrl.report.run_folder import RunFolder, read_steps
from spmdrl.report.series import History
from spmdrl.run import open_run, owning
from spmdrl.step.export import export_adapter, export_hf, refuse_overwriting, written_as
from spmdrl.tools.program import option, program
from spmdrl.types import UserError

# A model card for a run's model, written from the run's folder: data, settings, evaluations, versions.


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


# The export.


def export_checkpoint(
    run: Path, *, step: int | None = None, to: Path | None = None, dtype: str | None = None, adapter: bool = False
) -> Path:
    """Write the policy as it was after `step`, else after the newest one; returns the directory.

    With `adapter` only its adapters are written, as a PEFT directory. Raises UserError when there is no such
    checkpoint, when it is not whole, and when there are no adapters.
    """
    folder = RunFolder(run)
    cfg = read_run_config(str(folder.config), [])
    step = _step(folder, step)
    if adapter and cfg.lora is None:
        raise UserError(f"--adapter: {run} trained the whole model; leave it out")
    destination = to or (folder.adapter_after(step) if adapter else folder.hf_after(step))
    refuse_overwriting(cfg.model.path, destination)
    alone = cfg.model_copy(
        update={
            "run": cfg.run.model_copy(update={"deterministic": False}),
            "model": cfg.model.model_copy(update={"attention": "auto", "cpu_offload": False}),
            "parallel": ParallelConfig(),
        }
        | ({"true_on_policy": False} if isinstance(cfg, Config) else {})
    )
    load_model_config(alone.model)
    tokenizer = load_tokenizer(alone.model.path, trust_remote_code=alone.model.trust_remote_code)
    with open_run(alone, folder) as ranks, ExitStack() as exits:
        if destination.resolve().is_relative_to(run.resolve()):
            instead = "or name a directory outside of it: --to"
            exits.enter_context(owning(run, ranks.world, ranks.meshes.world, instead=instead))
        saved = folder_of(folder.checkpoints, step)
        require_whole(saved, ranks.meshes.training, remedy="name another by --step")
        policy = ranks.load_trained()
        restore_weights(saved, policy, ranks.meshes.training, name=POLICY)
        if adapter:
            export_adapter(policy, destination, ranks.meshes)
        else:
            written = written_as(dtype or cfg.export.dtype, DTYPES[_dtype_of_run(cfg, folder)])
            export_hf(policy, tokenizer, destination, ranks.meshes, **written)
        if ranks.world.is_main and folder.metrics.is_file():
            (destination / "README.md").write_text(model_card(run, step=step), encoding="utf-8")
    return destination


def _step(folder: RunFolder, wanted: int | None) -> int:
    steps = saved_steps(folder.checkpoints)
    if not steps:
        raise UserError(f"{folder.checkpoints} holds no checkpoint; set checkpoint.every in a run to get some")
    if wanted is not None and wanted not in steps:
        raise UserError(f"--step {wanted}: there is no such checkpoint; there are {', '.join(map(str, steps))}")
    return steps[-1] if wanted is None else wanted


def _dtype_of_run(cfg: Config | TuningConfig, folder: RunFolder) -> str:
    """That of the weights which the run sampled with: where "auto" has chosen, by the devices it ran on."""
    if cfg.model.compute_dtype != "auto":
        return cfg.model.compute_dtype
    return "bfloat16" if read_json(folder.versions, _Versions).cuda_devices else "float32"


class _Versions(BaseModel):
    """The part of versions.json that is read; a later version may write more."""

    model_config = ConfigDict(strict=True)
    cuda_devices: list[str]


@program("cannot export")
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; returns the exit code."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--step", type=option(NonNegativeInt), help="of the checkpoint; else the newest")
    parser.add_argument("--to", type=Path, help="directory to write; else RUN/hf- or RUN/adapter- and the step")
    parser.add_argument(
        "--dtype", choices=["auto", *DTYPES, "source"], help="of the files, as export.dtype; else that of the run"
    )
    parser.add_argument("--adapter", action="store_true", help="write the adapters alone, as a PEFT directory")
    parser.add_argument(
        "--push", metavar="ORGANISATION/NAME", help="send it to this repository of the hub, with its card"
    )
    parser.add_argument("--public", action="store_true", help="a repository that --push makes is for everybody to read")
    arguments = parser.parse_args(argv)
    if arguments.public and not arguments.push:
        parser.error("--public is about the repository that --push makes; give --push ORGANISATION/NAME")
    if arguments.push:
        require_writable(arguments.push)
    if arguments.adapter and arguments.dtype:
        parser.error("--dtype is that of a whole model's files; adapters are float32")
    transformers_logging.disable_progress_bar()  # the result is one line
    written = export_checkpoint(
        arguments.run, step=arguments.step, to=arguments.to, dtype=arguments.dtype, adapter=arguments.adapter
    )
    if os.environ.get("RANK", "0") == "0":
        say(shown(written))
        if arguments.push:
            say(send(written, arguments.push, private=not arguments.public))


if __name__ == "__main__":
    sys.exit(main())
