"""The demo with other seeds, and with stale rollouts: can its end be predicted, and what does staleness cost?

    python benchmarks/demo_seeds.py --result benchmarks/results/demo-seeds.json    finished runs are not repeated

Each run begins with the demo's warm start and is evaluated on its held-out questions. Without staleness there is one
for each seed; with `rollout.partial` and a limit of 1 to 8 steps one for each of the first `--stale-seeds`, with
`correction.kind = "icepop"` and the virtual clock. Responses are shorter than one of its ticks, so a group is finished
in the step that opens it, and then waits: after the first steps every token is as old as the limit allows.

- `forecasts`: what the first half of each run without staleness predicts of its last evaluation, by `spmdrl compare
  --fit`, and whether that lies in its 90 % interval; `recorded`: the same of whole demos, whose curves are in
  benchmarks/results.
- `staleness`: accuracy at equal tokens, the mean over the last quarter of the response tokens that every run has
  trained on. The band is that of the next seed without staleness: mean +- t sqrt(1 + 1/n) deviations of the n there
  are, at 95 %.

Prints one JSON object: `runs`, `forecasts`, `held` (how many intervals), `recorded`, `band`, `staleness`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from results import RESULTS, ROOT, print_result, provenance
from runs import curve, described, train, warm_start

from spmdrl.report.comparison import forecast, forecast_run
from spmdrl.report.run_folder import RunFolder, read_steps

SETTINGS = (  # over configs/demo.toml
    "run.num_steps=40",
    "run.deterministic=true",
    "rollout.prompts_per_step=16",
    "optim.schedule=constant",
    "eval.num_prompts=300",
    "eval.every=4",
    "pack.prefix_tree=auto",
)
STALE = ("rollout.partial=true", "rollout.max_running=2048", "correction.kind=icepop")
FEWEST, HELD_OUT = 9, 400  # evaluations that a fit needs; questions of the whole demos
POINTS = 20  # of the last quarter
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}  # t of 97.5 %, by seeds

Json = dict[str, Any]


def settings_of(staleness: int, seed: int, more: Sequence[str] = ()) -> tuple[str, ...]:
    """The settings of a run over configs/demo.toml."""
    stale = (*STALE, f"rollout.max_staleness={staleness}") if staleness else ()
    return (*SETTINGS, *stale, f"run.seed={seed}", *more)


def tokens_at(folder: RunFolder, steps: Sequence[int]) -> list[float]:
    """The response tokens that a run has trained on after each of these steps."""
    at, trained = curve(folder, "batch/loss_tokens")
    total = dict(zip(at, np.cumsum(trained).tolist(), strict=True))
    return [total.get(step, 0.0) for step in steps]


def row_of(folder: RunFolder, staleness: int, seed: int, settings: Sequence[str]) -> Json:
    """Describe one run: the reward it reached, and how stale its tokens were."""
    steps, accuracy = curve(folder, "eval/accuracy")
    means = {
        name: statistics.fmean(values)
        for name, metric in (
            ("mean_staleness_steps", "rollout/mean_staleness_steps"),
            ("effective_fraction", "mismatch/effective_fraction"),
            ("reward", "reward/mean"),
            ("sampled_reward", "reward/sampled_mean"),
        )
        if (values := curve(folder, metric)[1])
    }
    return {
        "max_staleness": staleness,
        "seed": seed,
        "steps": steps,
        "tokens": tokens_at(folder, steps),
        "accuracy": accuracy,
        "max_staleness_seen": max(curve(folder, "rollout/max_staleness_steps")[1], default=0.0),
        "discarded_tokens": sum(curve(folder, "rollout/discarded_tokens")[1]),
        **means,
        **described(folder, *settings),
    }


def at_equal_tokens(row: Json, tokens: float) -> float:
    """The mean accuracy over the last quarter of so many tokens."""
    return float(np.interp(np.linspace(0.75 * tokens, tokens, POINTS), row["tokens"], row["accuracy"]).mean())


def band_of(accuracies: Sequence[float]) -> tuple[float, float] | None:
    """Where the accuracy of the next seed lies, with 95 %; None for a number of seeds that has no row in the table."""
    if (t := STUDENT.get(len(accuracies))) is None:
        return None
    half = t * statistics.stdev(accuracies) * math.sqrt(1 + 1 / len(accuracies))
    return statistics.fmean(accuracies) - half, statistics.fmean(accuracies) + half


def compared(runs: Sequence[Json]) -> Json:
    """The runs at equal tokens beside the band of those without staleness."""
    tokens = min(row["tokens"][-1] for row in runs)
    reached = [(row["max_staleness"], at_equal_tokens(row, tokens)) for row in runs]
    band = band_of([accuracy for staleness, accuracy in reached if not staleness])
    rows = []
    for limit in dict.fromkeys(staleness for staleness, _ in reached):
        of_limit = [accuracy for staleness, accuracy in reached if staleness == limit]
        stale = [row.get("mean_staleness_steps", 0.0) for row in runs if row["max_staleness"] == limit]
        inside = None if band is None else [band[0] <= accuracy <= band[1] for accuracy in of_limit]
        rows.append(
            {
                "max_staleness": limit,
                "mean_staleness_steps": statistics.fmean(stale),
                "accuracy": of_limit,
                "mean": statistics.fmean(of_limit),
                "inside": inside,
            }
        )
    return {"equal_tokens": tokens, "band": band, "staleness": rows}


def recorded() -> list[Json]:
    """Predict each curve of a whole demo from its first half, where it has evaluations enough."""
    found = []
    for file in sorted(RESULTS.glob("demo*.json")):
        rows = json.loads(file.read_text(encoding="utf-8")).get("evaluations", ())
        if len(rows) < FEWEST or not isinstance(rows[0], dict):
            continue
        values = np.array([row["eval/accuracy"] for row in rows])
        noise = float(np.sqrt(np.median(values * (1 - values)) / HELD_OUT))
        made = forecast(np.array([row["step"] for row in rows]), values, noise=noise, bounds=(0.0, 1.0))
        found.append({"file": file.name, "predicted": made.predicted, "holds": made.holds, **asdict(made)})
    return found


def main() -> int:
    """Train what is not there yet, predict and compare, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="what all begin with; made where it is not given")
    parser.add_argument("--seeds", type=int, default=5, help="runs without staleness")
    parser.add_argument("--staleness", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--stale-seeds", type=int, default=2, help="runs with each staleness")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/demo-seeds", help="where run folders are made")
    parser.add_argument("--result", type=Path, help="a file for the result")
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="over those of every run")
    args = parser.parse_args()
    content: Json = {"about": "the demo with other seeds and with stale rollouts", **provenance(), "runs": []}
    args.runs.mkdir(parents=True, exist_ok=True)
    model = (args.model or warm_start(args.runs)).resolve()
    content["forecasts"] = []
    wanted = [(0, seed) for seed in range(1, args.seeds + 1)]
    wanted += [(limit, seed) for limit in args.staleness for seed in range(1, args.stale_seeds + 1)]
    for limit, seed in wanted:
        settings = settings_of(limit, seed, args.settings)
        folder = train(args.runs / f"staleness-{limit}-seed-{seed}", f"model.path={model}", *settings)
        content["runs"].append(row_of(folder, limit, seed, settings))
        if not limit:
            measure, found = forecast_run(read_steps(folder.path), folder.path.name)
            predicted = {"measure": measure, "predicted": found.predicted, "holds": found.holds}
            content["forecasts"].append({"seed": seed, **predicted, **asdict(found)})
        print(limit, seed, content["runs"][-1]["accuracy"], file=sys.stderr, flush=True)
    content["held"] = sum(one["holds"] for one in content["forecasts"])
    content |= {"recorded": recorded(), **compared(content["runs"])}
    print_result(content, args.result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
