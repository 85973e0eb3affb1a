"""Train with rollouts that go on over refits, from keys and values that are read again or kept: what each differs by.

    python benchmarks/kept_cache.py --result benchmarks/results/kept-cache.json    finished runs are not repeated

The demo on one rank by the real clock, with few rows, so that every step leaves responses unfinished. The tokens after
a refit are those of the newest weights, which the trainer has when it trains on them: after `recompute` what is left of
their mismatch is rounding and the staleness of those that wait for another step, and `keep` adds its older keys. Prints
one JSON object: `runs`, with means over steps; `keep_over_recompute` is the ratio of their medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from results import ROOT, print_result, provenance
from runs import curve, described, train, warm_start

SETTINGS = (  # over configs/demo.toml
    "run.num_steps=30",
    "run.deterministic=false",
    "rollout.prompts_per_step=16",
    "rollout.partial=true",
    "rollout.max_staleness=1",
    "rollout.max_running=32",
    "offload.engine=[]",
    "correction.kind=icepop",
    "optim.schedule=constant",
    "eval.every=10",
)
METRICS = {
    "after_refit_nats": "mismatch/mean_abs_nats_after_refit",
    "all_nats": "mismatch/mean_abs_nats",
    "probe_nats": "refit/probe_mean_abs_nats",
    "mean_staleness_steps": "rollout/mean_staleness_steps",
    "continued_count": "rollout/continued_count",
    "effective_fraction": "mismatch/effective_fraction",
}


def main() -> int:
    """Train what is not there yet, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="what all begin with; made where it is not given")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/kept-cache", help="where run folders are made")
    parser.add_argument("--result", type=Path, help="a file for the result")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="over those of every run")
    args = parser.parse_args()
    about = "mismatch of tokens after a refit, whose responses go on from keys and values of older weights or not"
    content: dict[str, Any] = {"about": about, **provenance(), "runs": []}
    args.runs.mkdir(parents=True, exist_ok=True)
    model = (args.model or warm_start(args.runs)).resolve()
    medians: dict[str, list[float]] = {"recompute": [], "keep": []}
    for seed in range(1, args.seeds + 1):
        for setting, found in medians.items():
            settings = (*SETTINGS, f"rollout.cache_after_refit={setting}", f"run.seed={seed}", *args.settings)
            folder = train(args.runs / f"{setting}-{seed}", f"model.path={model}", *settings)
            curves = {name: curve(folder, metric)[1] for name, metric in METRICS.items()}
            means = {name: statistics.fmean(values) for name, values in curves.items() if values}
            accuracy = curve(folder, "eval/accuracy")[1]
            row = {"cache_after_refit": setting, "seed": seed, **means, "accuracy": accuracy}
            content["runs"].append(row | described(folder, *settings))
            found.append(means.get("after_refit_nats", 0.0))
            print(setting, seed, means, file=sys.stderr, flush=True)
    kept, read = (statistics.median(medians[setting]) for setting in ("keep", "recompute"))
    print_result(content | {"keep_over_recompute": kept / read if read else None}, args.result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
