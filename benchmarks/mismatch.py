"""Train with a mismatched engine, with and without corrections: runs, their curves, and a picture of them.

    python benchmarks/mismatch.py --model runs/demo-...-sft/hf     minutes a run; finished runs are not repeated
    python benchmarks/mismatch.py --variants "fp8" "fp8 with TIS" "exact engine" --seeds 1 --runs runs/fp8 \
        --result benchmarks/results/fp8.json --picture docs/images/fp8.svg run.num_steps=100
    python benchmarks/mismatch.py --draw-only

MODEL, the warm start that `make demo` leaves, is trained with the demo's tasks, once for each variant and seed: with
the engine of `noisy_engine.py` without correction, with TIS and with MIS, and with an exact one. Without correction is
what a trainer does that knows nothing of the mismatch: it computes old log-probabilities itself and ignores the
engine's. With "fp8" the engine samples with the numbers that e4m3 weights stand for (`rollout.quantization`). Writes
benchmarks/results/mismatch.json and, from that file alone, docs/images/mismatch.svg; prints one JSON object: `result`
and `picture` (the files), `runs` (how many), `accuracy` (the last one of each).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from noisy_engine import NoisyEngine
from results import RESULTS, ROOT, provenance
from results import write_result as write_file
from runs import described, finished, train

from spmdrl.report.curves import FAINT_INK, RUN_COLORS, STYLE
from spmdrl.report.files import read_rows
from spmdrl.report.run_folder import RunFolder
from spmdrl.report.series import smoothed

RESULT, PICTURE = RESULTS / "mismatch.json", ROOT / "docs/images/mismatch.svg"
MAX_SEEDS = 10  # seeds are below
SETTINGS = (  # over configs/demo.toml
    "run.num_steps=160",
    "rollout.prompts_per_step=32",
    # Without a baseline for each prompt, what the mismatch adds to the gradient of a hard prompt does not cancel.
    "advantage.estimator=reinforce_plus_plus",
    "optim.schedule=constant",
    "eval.every=20",
)
MASK = ("correction.kind=mis", "correction.mode=mask", "correction.low=0.5", "correction.high=5.0")
NOISY = "rollout.engine=benchmarks/noisy_engine.py:NoisyEngine"
VARIANTS: dict[str, tuple[str, ...]] = {  # settings
    "no correction": (NOISY,),
    "TIS": (NOISY, "correction.kind=tis", "correction.level=token", "correction.high=2.0"),
    "MIS": (NOISY, *MASK, "correction.level=token"),
    "exact engine": (),
}
COLORS = dict(zip(VARIANTS, (RUN_COLORS[1], RUN_COLORS[0], RUN_COLORS[2], FAINT_INK), strict=True))
FP8 = "rollout.quantization=fp8"
NEVER_BINDS = ("correction.reject=sequence", "correction.reject_low=1e-12", "correction.reject_high=1e12")
OF_FP8 = {"fp8": (FP8, *NEVER_BINDS), "fp8 with TIS": (FP8, *VARIANTS["TIS"][1:])}
COLORS |= {"fp8": COLORS["no correction"], "fp8 with TIS": COLORS["TIS"]}
METRICS = {  # of the result: of metrics.jsonl
    "reward": "reward/mean",
    "k3_nats": "mismatch/k3_nats",
    "mean_abs_nats": "mismatch/mean_abs_nats",
    "effective_fraction": "mismatch/effective_fraction",
    "entropy_nats": "update/entropy_nats",
    "grad_norm": "update/grad_norm",
    "probe_mean_abs_nats": "refit/probe_mean_abs_nats",  # where refit.probe_prompts is set
}

Json = dict[str, Any]


def main() -> None:
    """Train what was asked for and is not there yet, write the result, draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "runs/demo-sft/hf", help="the warm start of `make demo`")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS | OF_FP8, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/mismatch", help="where run folders are made")
    parser.add_argument("--draw-only", action="store_true", help="draw the result that is there")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="over those of every run")
    args = parser.parse_args()
    if not args.draw_only:
        origin = provenance()
        for seed in args.seeds:
            for variant in args.variants:
                asked = (*settings_of(variant, seed), f"model.path={args.model.resolve()}", *args.settings)
                train(folder_of(args.runs, variant, seed).path, *asked)
        write_result(args.result, args.runs, origin)
    runs = json.loads(args.result.read_text(encoding="utf-8"))["runs"]
    draw(runs, args.picture)
    files = {"result": str(args.result), "picture": str(args.picture)}
    print(json.dumps({**files, "runs": len(runs), "accuracy": [run["accuracy"][-1] for run in runs]}))


def folder_of(runs: Path, variant: str, seed: int) -> RunFolder:
    """Where a run is, or will be."""
    return RunFolder(runs / f"{variant.replace(' ', '-')}-{seed}")


def settings_of(variant: str, seed: int) -> tuple[str, ...]:
    """The settings of a run over configs/demo.toml, without the places of model and run."""
    return (*SETTINGS, *(VARIANTS | OF_FP8)[variant], f"run.seed={seed}")


def write_result(path: Path, runs: Path, origin: Json) -> None:
    """Write the curves of all finished runs with what they were measured on."""
    places = [(variant, seed) for variant in VARIANTS | OF_FP8 for seed in range(MAX_SEEDS)]
    content = {
        "about": "reward and held-out accuracy of runs whose engine samples with other weights",
        **origin,
        "noise": NoisyEngine.noise,
        "runs": [
            curves(variant, seed, folder_of(runs, variant, seed))
            for variant, seed in places
            if finished(folder_of(runs, variant, seed))
        ],
    }
    write_file(path, content, indent=None)


def curves(variant: str, seed: int, folder: RunFolder) -> Json:
    """Collect the curves of one run, over steps and evaluations."""
    rows = read_rows(folder.metrics)
    steps, evaluations = [row for row in rows if "reward/mean" in row], [row for row in rows if "eval/accuracy" in row]
    return {
        "variant": variant,
        "seed": seed,
        **described(folder, *settings_of(variant, seed)),
        "eval_steps": [row["step"] for row in evaluations],
        "accuracy": [row["eval/accuracy"] for row in evaluations],
        **{name: [rounded(row[metric]) for row in steps] for name, metric in METRICS.items() if metric in steps[0]},
    }


def rounded(value: float | None) -> float | None:
    """To what a curve shows."""
    return None if value is None else float(f"{value:.4g}")


def draw(runs: Sequence[Json], path: Path) -> None:
    """Reward of what was trained on, the policy's own accuracy, and its entropy; a thin line for each seed, a thick
    one for their mean."""
    with rc_context({**STYLE, "svg.hashsalt": "mismatch"}):  # the same bytes from the same result
        figure = Figure(figsize=(12.0, 3.8), layout="constrained", facecolor="white")
        reward, accuracy, entropy = figure.subplots(1, 3)
        for variant in dict.fromkeys(run["variant"] for run in runs):
            color, of_variant = COLORS[variant], [run for run in runs if run["variant"] == variant]
            steps = range(1, len(of_variant[0]["reward"]) + 1)
            for axes, name in ((reward, "reward"), (entropy, "entropy_nats")):
                curves = [smoothed(np.array(run[name], dtype=float)) for run in of_variant]
                draw_lines(axes, steps, curves, color=color, label=variant)
            own = [np.array(run["accuracy"], dtype=float) for run in of_variant]
            draw_lines(accuracy, of_variant[0]["eval_steps"], own, color=color, label=variant)
        reward.set_title("training reward, sampled by the engine", loc="left", fontweight="bold")
        accuracy.set_title("held-out accuracy of the own weights", loc="left", fontweight="bold")
        entropy.set_title("entropy of the policy, nats a token", loc="left", fontweight="bold")
        for axes, top in ((reward, 1.0), (accuracy, 1.0), (entropy, None)):
            axes.set_xlabel("step")
            axes.set_ylim(0.0, top)
        reward.legend(loc="upper left", ncols=2)
        figure.savefig(path, metadata={"Date": None})


def draw_lines(axes: Axes, steps: Sequence[int], curves: Sequence[np.ndarray], *, color: str, label: str) -> None:
    """The curves [n] of the seeds and their mean."""
    for curve in curves:
        axes.plot(steps, curve, color=color, linewidth=0.8, alpha=0.4)
    axes.plot(steps, np.mean(curves, axis=0), color=color, linewidth=2.2, label=label)


if __name__ == "__main__":
    main()
