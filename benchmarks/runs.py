"""Runs that a program of benchmarks makes: each in a process forked from this one, which has imported everything.

A run that is finished in its folder is not repeated, so that a program that was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from results import ROOT

import spmdrl.engine.torch.engine
import spmdrl.report.curves
import spmdrl.sft
import spmdrl.train
from spmdrl.report.files import read_rows
from spmdrl.report.run_folder import RunFolder
from spmdrl.tools.tiny_model import save_tiny_model

DEMO = "configs/demo.toml"
QUIET = ("run.threads_per_rank=1", "report.console=plain", "report.tensorboard=false", "resume.checkpoint=never")


def train(folder: Path, *settings: str, config: str = DEMO) -> RunFolder:
    """Train by reinforcement learning on one rank, unless the folder holds the finished run; returns the folder."""
    return _run(spmdrl.train.main, folder, (config, *QUIET, "export.at_end=false", *settings))


def warm_start(folder: Path, *settings: str) -> Path:
    """Make the model that the demo begins with: tiny, with random weights, and fine-tuned a little."""
    base = folder / "demo-base"
    if not (base / "config.json").is_file():
        save_tiny_model(base, num_layers=2, hidden_size=128)
    return fine_tune(folder / "demo-sft", f"model.path={base}", *settings)


def fine_tune(
    folder: Path,
    *settings: str,
    config: str = "configs/demo-sft.toml",
    program: Callable[[Sequence[str]], int] = spmdrl.sft.main,
) -> Path:
    """Fine-tune a model, or by another program make one of another kind; returns where its weights are."""
    return _run(program, folder, (config, *QUIET, *settings)).path / "hf"


def finished(folder: RunFolder) -> bool:
    """Return True when the run in this folder took its last step."""
    if not folder.plan.is_file():
        return False
    rows = read_rows(folder.metrics)
    return bool(rows) and rows[-1]["step"] == json.loads(folder.plan.read_text(encoding="utf-8"))["num_steps"]


def curve(folder: RunFolder, name: str) -> tuple[list[int], list[float]]:
    """A metric of a run: the steps that report it, and its values."""
    rows = [row for row in read_rows(folder.metrics) if row.get(name) is not None]
    return [row["step"] for row in rows], [row[name] for row in rows]


def described(folder: RunFolder, *settings: str, config: str = DEMO) -> dict[str, Any]:
    """Describe a run for a result file: its command without the places of model and run, and its versions."""
    return {
        "command": " ".join(["python -m spmdrl.train", config, *settings]),
        "versions": json.loads(folder.versions.read_text(encoding="utf-8")),
    }


def _run(program: Callable[[Sequence[str]], int], folder: Path, arguments: Sequence[str]) -> RunFolder:
    path = folder.resolve()
    found = RunFolder(path)
    if not finished(found):
        where = (f"run.dir={path.parent}", f"run.name={path.name}")
        process = multiprocessing.get_context("fork").Process(target=_begin, args=(program, [*arguments, *where]))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"the run in {path} ended with exit code {process.exitcode}")
    return found


def _begin(program: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> None:
    """Run a program in a process of its own, which prints nothing where this one prints its result."""
    os.dup2(2, 1)
    sys.stdout = sys.stderr  # the one before cannot be configured where it is a file and standard error is a pipe
    os.chdir(ROOT)
    print(program.__module__, *arguments, file=sys.stderr, flush=True)
    sys.exit(program(arguments))
