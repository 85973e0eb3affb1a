"""Demos without and with `pack.prefix_tree`: are their curves the same, and which share of the tokens is saved?

    python benchmarks/demo_trees.py --result benchmarks/results/demo-prefix-tree-tasks.json    finished runs stay

Each task is trained twice from one fine-tuned model, on one rank and with one seed. Sums in another order change last
bits, until one token is sampled otherwise; from there on these are two runs. A step is the same where its mean reward
(to 1e-6) and its number of response tokens are, and all steps before it: `same_steps`. `largest` says how far apart
losses and gradient norms are in those, `mean_apart` in all. `shared_fraction` is the share of tokens that trees did not
compute again, the mean of all steps; `same_bits` says that no number of any step differs. `other_order` compares flat
rows with flat rows in micro-batches of a quarter of the tokens, whose sums are in another order too: what rounding
alone does.

Prints one JSON object: `tasks`, and what the runs were made with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results import ROOT, provenance, write_result
from runs import curve, described, fine_tune, train

import spmdrl.pairs
from spmdrl.report.run_folder import RunFolder
from spmdrl.tools import demo_data, tiny_model
from spmdrl.tools.demo import TASKS

SETTINGS = ("run.num_steps=30", "run.deterministic=true")
TREES = "pack.prefix_tree=auto"
METRICS = {
    "reward": "reward/mean",
    "response_tokens": "batch/loss_tokens",
    "loss": "update/loss",
    "grad_norm": "update/grad_norm",
}
SAME = {"reward": 1e-6, "response_tokens": 0.0}  # how far apart they may be in a step that is the same; rounding
SHARED = "batch/shared_fraction"

Json = dict[str, Any]


def start_of(task: str, folder: Path, steps: int) -> tuple[str, ...]:
    """Make what both runs of a task begin with, as `python -m spmdrl.tools.demo` does; returns settings that name it.

    Each fine-tuning takes at most `steps` steps.
    """
    demo = TASKS[task]
    if task in demo_data.TASKS or demo.ranks:
        demo_data.main([task, f"{ROOT}/runs/demo-{task}-data"])  # where configurations look for it
    base = folder / ("base" if demo.is_plain else f"{task}-base")
    if not (base / "config.json").is_file():
        tiny_model.main([f"{base}", *demo.model_options])
    name = "sft" if demo.is_plain else f"{task}-sft"
    config = f"configs/demo-{name}.toml"
    settings = [f"model.path={fine_tune(folder / name, f'model.path={base}', *most(config, steps), config=config)}"]
    if demo.teacher:
        more = (*most(config, steps), *demo.teacher, f"run.num_steps={steps}")
        teacher = fine_tune(folder / "teacher", f"model.path={base}", *more, config=config)
        settings.append(f"models.teacher.path={teacher}")
    if demo.ranks:
        ranking = "configs/demo-pairs-rank.toml"
        ranks = fine_tune(
            folder / "rank", settings[0], *most(ranking, steps), config=ranking, program=spmdrl.pairs.main
        )
        measured = '{kind="exact",weight=0.0}'
        settings.append(f'reward.terms=[{{kind="model",path="{ranks}",template="pairs"}},{measured}]')
    return tuple(settings)


def read(config: str) -> Json:
    """Read a configuration of the demos."""
    return tomllib.loads((ROOT / config).read_text(encoding="utf-8"))


def most(config: str, steps: int) -> tuple[str, ...]:
    """Settings with which a fine-tuning takes no more than `steps` steps."""
    num_steps = min(steps, read(config)["run"]["num_steps"])
    warmup = min(num_steps // 2, read(config)["optim"].get("warmup_steps", 0))
    return f"run.num_steps={num_steps}", f"optim.warmup_steps={warmup}"


def compared(flat: RunFolder, trees: RunFolder) -> Json:
    """Compare two runs step by step."""
    columns = {name: [curve(run, metric)[1] for run in (flat, trees)] for name, metric in METRICS.items()}
    steps = range(len(columns["reward"][0]))
    apart = {name: [abs(a - b) for a, b in zip(*both, strict=True)] for name, both in columns.items()}
    are_same = (all(apart[name][step] <= limit for name, limit in SAME.items()) for step in steps)
    same = sum(itertools.takewhile(bool, are_same))
    shared = curve(trees, SHARED)[1]
    return {
        "same_steps": same,
        "same_bits": not any(itertools.chain(*apart.values())),
        "largest": {name: max(apart[name][:same], default=None) for name in ("loss", "grad_norm")},
        "means": {name: [statistics.fmean(one) for one in both] for name, both in columns.items()},
        "mean_apart": {name: statistics.fmean(values) for name, values in apart.items()},
        "shared_fraction": statistics.fmean(shared) if shared else 0.0,
        "steps": [
            [step + 1, *(one[step] for both in columns.values() for one in both), *shared[step : step + 1]]
            for step in steps
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not there yet and compare it; print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=["tool", "game", "notes", "pairs", "distill"])
    parser.add_argument("--start-steps", type=int, default=500, help="of each fine-tuning at most")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/demo-trees", help="where run folders are made")
    parser.add_argument("--result", type=Path, help="a file for the result")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="over those of every run")
    args = parser.parse_args(argv)
    about = "demos without and with prefix trees, from one start each"
    columns = ["step", *(f"{name} of {rows}" for name in METRICS for rows in ("flat rows", "trees")), SHARED]
    content: Json = {"about": about, **provenance(), "start_steps": args.start_steps, "columns": columns, "tasks": {}}
    args.runs.mkdir(parents=True, exist_ok=True)
    for task in args.tasks:
        started = start_of(task, args.runs.resolve(), args.start_steps)
        config = f"configs/demo-{task}.toml"
        settings = (*SETTINGS, *args.settings)
        settings += ("eval.every=0",) if "eval" in read(config) else ()
        flat = train(args.runs / f"{task}-flat", *started, *settings, config=config)
        trees = train(args.runs / f"{task}-trees", *started, *settings, TREES, config=config)
        found = {**described(trees, *settings, TREES, config=config), **compared(flat, trees)}
        quarter = f"pack.max_tokens_per_micro_batch={read(config)['pack']['max_tokens_per_micro_batch'] // 4}"
        other = train(args.runs / f"{task}-quarter", *started, *settings, quarter, config=config)
        control = compared(flat, other)
        found["other_order"] = {name: control[name] for name in ("same_steps", "same_bits", "means", "mean_apart")}
        content["tasks"][task] = found
        print(task, {name: content["tasks"][task][name] for name in ("same_steps", "shared_fraction")}, file=sys.stderr)
        if args.result is not None:
            write_result(args.result, content)
    print(json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
