"""Time training steps of spmdrl on workload W: runs of `spmdrl.train` itself, as a user starts them.

    python benchmarks/spmdrl_step.py --workload fixed --beta 0

One process on `--threads` threads, or several under torchrun, as its peer. Where the workload has lengths, an engine of
`forced_lengths.py` is named; nothing else is special. A step's time is the run's own `time/step_s`, from report to
report. Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import workload

HERE = Path(__file__).resolve().parent
ENGINES: Mapping[workload.Workload, str] = {
    "fixed": f"{HERE}/forced_lengths.py:FixedLengths",
    "tail": f"{HERE}/forced_lengths.py:TailLengths",
    "natural": "torch",
}
MEAN_RESPONSE_TOKENS: Mapping[workload.Workload, int] = {"fixed": 32, "tail": 32, "natural": 64}  # at most
CONFIG = """\
[run]
name = "bench"
dir = "{folder}/runs"
num_steps = {num_steps}
threads_per_rank = {threads}
[model]
path = "{folder}/model"
[data]
max_prompt_tokens = {prompt_tokens}
[[data.sources]]
kind = "jsonl"
path = "{folder}/prompts.jsonl"
[rollout]
engine = "{engine}"
prompts_per_step = {prompts}
group_size = {group_size}
max_response_tokens = {max_response_tokens}
max_running = {rollouts}
{learns}
[loss]
clip_low = {clip}
clip_high = {clip}
kl_coef = {beta}
[optim]
lr = {lr}
max_grad_norm = {max_grad_norm}
[pack]
max_tokens_per_micro_batch = {budget}
[parallel]
dp_replicate = {ranks}
[export]
at_end = false
[report]
console = "plain"
"""

FROM_REWARDS = """\
[reward]
terms = [{{ kind = "function", function = "{here}/workload.py:reward" }}]
"""
FROM_TEACHER = """\
[models.teacher]
path = "{folder}/teacher"
[distill]
teacher = "teacher"
[advantage]
estimator = "none"
[reward]
terms = []
"""

Row = Mapping[str, Any]


def main() -> None:
    """Train, print one JSON object."""
    args = workload.parse_step_arguments(__doc__.splitlines()[0])
    num_steps = args.warmup_steps + args.steps
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload.build_model_directory(folder / "model", size=args.size)
        if args.teacher_layers:
            workload.build_model_directory(folder / "teacher", size=args.size, teacher_layers=args.teacher_layers)
        workload.write_prompts(folder / "prompts.jsonl", num_steps=num_steps, count=workload.prompts_per_step(args))
        (folder / "config.toml").write_text(config(args, folder, num_steps), encoding="utf-8")
        launcher = workload.torchrun(args.ranks) if args.ranks > 1 else []
        subprocess.run(
            [sys.executable, *launcher, "-m", "spmdrl.train", str(folder / "config.toml")],
            cwd=HERE.parent,
            env={**os.environ, **workload.best_environment(threads=args.threads)},
            stdout=sys.stderr,
            check=True,
        )
        rows = [json.loads(line) for line in (folder / "runs/bench/metrics.jsonl").read_text().splitlines()]
        chosen = json.loads((folder / "runs/bench/machine.json").read_text())
    kernels = {name: chosen[name] for name in ("linear_kernels", "layers_in_c")}
    print(json.dumps({**result(args, rows), **kernels}))


def config(args: argparse.Namespace, folder: Path, num_steps: int) -> str:
    """The settings of workload W."""
    longest = workload.MAX_RESPONSE_TOKENS[args.workload]
    rollouts = workload.prompts_per_step(args) * workload.GROUP_SIZE
    tokens = rollouts // args.ranks * (workload.PROMPT_TOKENS + MEAN_RESPONSE_TOKENS[args.workload])
    return CONFIG.format(
        folder=folder,
        learns=(FROM_TEACHER if args.teacher_layers else FROM_REWARDS).format(folder=folder, here=HERE),
        num_steps=num_steps,
        threads=args.threads,
        engine=ENGINES[args.workload],
        prompt_tokens=workload.PROMPT_TOKENS,
        prompts=workload.prompts_per_step(args),
        group_size=workload.GROUP_SIZE,
        rollouts=rollouts,
        max_response_tokens=longest,
        clip=workload.CLIP,
        beta=args.beta,
        lr=workload.LEARNING_RATE,
        max_grad_norm=workload.MAX_GRAD_NORM,
        budget=tokens + longest,  # one micro-batch for each rank
        ranks=args.ranks,  # each holds all weights, as its peer's do
    )


def result(args: argparse.Namespace, rows: Sequence[Row]) -> Mapping[str, Any]:
    """Make the object that is printed."""
    counted = rows[args.warmup_steps :]
    steps_s = [row["time/step_s"] for row in counted]
    names = [name for name in counted[-1] if name.startswith("time/") and name != "time/step_s"]
    shares = {name: sum(row.get(name, 0.0) for row in counted) / sum(steps_s) for name in names}
    return workload.step_result(
        args,
        trainer="spmdrl",
        steps_s=steps_s,
        response_tokens=[int(row["batch/loss_tokens"]) for row in rows],
        rewards=[row.get("reward/mean", 0.0) for row in rows],  # a teacher gives none
        phase_fractions={name.removeprefix("time/").removesuffix("_s"): share for name, share in shares.items()},
        packages=["torch", "transformers"],
    )


if __name__ == "__main__":
    main()
