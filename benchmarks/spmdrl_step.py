"""Time training steps of spmdrl on workload W: the loop of `spmdrl.train` itself, reports included.

    python benchmarks/spmdrl_step.py --workload fixed --beta 0

One process on `--threads` threads, as its peer. The engine is told when each response ends; nothing else is special.
Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import workload

import spmdrl.train
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.types import Request, Response

CONFIG = """\
[run]
name = "bench"
dir = "{folder}/runs"
num_steps = {num_steps}
threads_per_rank = {threads}
[model]
path = "{folder}/model"
[data]
max_prompt_tokens = 6
[[data.sources]]
kind = "jsonl"
path = "{folder}/prompts.jsonl"
[rollout]
prompts_per_step = {prompts}
group_size = {group_size}
max_response_tokens = {max_response_tokens}
[reward]
terms = [{{ kind = "function", function = "{reward}:reward" }}]
[loss]
clip_low = {clip}
clip_high = {clip}
kl_coef = {beta}
[optim]
lr = {lr}
max_grad_norm = {max_grad_norm}
[pack]
max_tokens_per_micro_batch = {budget}
[export]
at_end = false
[report]
console = "plain"
"""


class ForcedLengths:
    """An engine whose responses end where the workload says: no token stops them before."""

    def __init__(self, engine: RolloutEngine, which: workload.Workload) -> None:
        self._engine = engine
        self._which = which

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Iterable[Request]) -> Iterator[tuple[int, Response]]:
        """Lengths are those of the step that the loaded weights are about to begin."""
        lengths = workload.response_lengths(self._which, step=self._engine.version + 1)
        forced = [
            dataclasses.replace(request, max_response_tokens=length, stop_token_ids=frozenset())
            for request, length in zip(requests, lengths, strict=False)
        ]
        return self._engine.generate(forced)


def main() -> None:
    """Train, print one JSON object."""
    args = parse_arguments()
    workload.use_best_environment(threads=args.threads)
    step_ends: list[float] = []

    def stamped(update: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            metrics = update(*arguments, **options)
            step_ends.append(time.perf_counter())
            return metrics

        return wrapped

    start_engine = spmdrl.train.start_engine
    spmdrl.train.start_engine = lambda *parts: ForcedLengths(start_engine(*parts), args.workload)
    spmdrl.train.update = stamped(spmdrl.train.update)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        workload.build_model_directory(folder / "model")
        num_steps = args.warmup_steps + args.steps
        workload.write_prompts(folder / "prompts.jsonl", num_steps=num_steps)
        (folder / "config.toml").write_text(config(args, folder, num_steps), encoding="utf-8")
        with redirect_stdout(sys.stderr):
            code = spmdrl.train.main([str(folder / "config.toml")])
        assert code == 0, f"training ended with exit code {code}"
        rows = [json.loads(line) for line in (folder / "runs/bench/metrics.jsonl").read_text().splitlines()]
    print(json.dumps(result(args, step_ends, rows)))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=workload.WORKLOADS, default="fixed")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the k3 divergence to the reference model")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps that are not counted, at least 1")
    parser.add_argument("--steps", type=int, default=20, help="steps that are counted")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def config(args: argparse.Namespace, folder: Path, num_steps: int) -> str:
    """The settings of workload W."""
    longest = workload.MAX_RESPONSE_TOKENS[args.workload]
    return CONFIG.format(
        folder=folder,
        num_steps=num_steps,
        threads=args.threads,
        prompts=workload.PROMPTS_PER_STEP,
        group_size=workload.GROUP_SIZE,
        max_response_tokens=longest,
        reward=Path(workload.__file__).resolve(),
        clip=workload.CLIP,
        beta=args.beta,
        lr=workload.LEARNING_RATE,
        max_grad_norm=workload.MAX_GRAD_NORM,
        budget=workload.ROLLOUTS_PER_STEP * (workload.PROMPT_TOKENS + 32) + longest,
    )


def result(args: argparse.Namespace, step_ends: list[float], rows: list[dict[str, Any]]) -> Mapping[str, Any]:
    """What is printed."""
    first = args.warmup_steps
    steps_s = [end - start for start, end in zip(step_ends[first - 1 :], step_ends[first:], strict=False)]
    assert len(steps_s) == args.steps, f"{len(steps_s)} steps were timed, not {args.steps}"
    lengths = [sum(workload.response_lengths(args.workload, step + 1)) for step in range(first, first + args.steps)]
    counted = rows[first:]
    assert [row["batch/loss_tokens"] for row in counted] == lengths, "the engine did not follow the workload's lengths"
    phases = {name: sum(row[f"time/{name}_s"] for row in counted) for name in PHASES}
    rewards = [row["reward/mean"] for row in rows]
    return {
        "trainer": "spmdrl",
        "workload": args.workload,
        "beta": args.beta,
        "num_ranks": 1,
        "threads_per_rank": args.threads,
        "warmup_steps": args.warmup_steps,
        "steps_s": steps_s,
        "median_s": statistics.median(steps_s),
        "phase_fractions": {name: seconds / sum(steps_s) for name, seconds in phases.items()},
        "response_tokens": statistics.fmean(lengths),
        "response_tokens_per_s": sum(lengths) / sum(steps_s),
        "reward_mean": statistics.fmean(rewards[first:]),
        "reward_first": statistics.fmean(rewards[:10]),
        "reward_last": statistics.fmean(rewards[-10:]),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "load_average": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers"]),
    }


PHASES = ("rollout", "reward", "batch", "logprobs", "update", "refit")

if __name__ == "__main__":
    main()
