"""Time training steps of TRL's GRPOTrainer on workload W, in its fastest configuration on a CPU.

    .venv-trl/bin/python benchmarks/trl_step.py --workload fixed --beta 0

One process: float32, SDPA, plain `generate`, no gradient checkpointing, fused AdamW, all 128 rollouts in one
micro-batch. Runs in an environment of its own (`benchmarks/run.sh`) and knows nothing of spmdrl.
Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import workload
from datasets import Dataset
from generate_peer import ForcedLengths
from transformers import AutoTokenizer, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Stopwatch:
    """Seconds spent in each phase, by step; a step ends when its optimizer step does."""

    def __init__(self) -> None:
        self.step_ends: list[float] = []
        self._phases: list[dict[str, float]] = [{}]

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time counted as `phase` of the running step."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent = self._phases[-1]
                spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - start

        return wrapped

    def end_step(self) -> None:
        """Close the running step and open the next."""
        self.step_ends.append(time.perf_counter())
        self._phases.append({})

    def steps_s(self, first: int) -> list[float]:
        """The duration of each step from index `first` (at least 1) on."""
        return [end - start for start, end in zip(self.step_ends[first - 1 :], self.step_ends[first:], strict=False)]

    def phase_fraction(self, phase: str, first: int) -> float:
        """The share of a phase in the steps from index `first` on."""
        return sum(spent.get(phase, 0.0) for spent in self._phases[first:-1]) / sum(self.steps_s(first))


class StepEnds(TrainerCallback):
    """Tells the stopwatch when an optimizer step has ended."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after `optimizer.step()`."""
        self._stopwatch.end_step()


def main() -> None:
    """Train, print one JSON object."""
    args = parse_arguments()
    workload.use_best_environment(threads=args.threads)
    torch.set_num_threads(args.threads)
    stopwatch, rewards = Stopwatch(), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(args, Path(folder), rewards)
        force_lengths(trainer, args.workload)
        trainer.model.generate = stopwatch.timed("generate", trainer.model.generate)
        trainer._generate_and_score_completions = stopwatch.timed("rollout", trainer._generate_and_score_completions)
        trainer.add_callback(StepEnds(stopwatch))
        trainer.train()
    print(json.dumps(result(args, stopwatch, rewards)))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=workload.WORKLOADS, default="fixed")
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the k3 divergence to the reference model")
    parser.add_argument("--warmup-steps", type=int, default=2, help="steps that are not counted, at least 1")
    parser.add_argument("--steps", type=int, default=20, help="steps that are counted")
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of the 128 rollouts, one backward each")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def build_trainer(args: argparse.Namespace, folder: Path, rewards: list[float]) -> GRPOTrainer:
    """The trainer in its fastest configuration; each step's mean reward is appended to `rewards`."""
    directory = workload.build_model_directory(folder / "model")
    num_steps = args.warmup_steps + args.steps
    workload.write_prompts(folder / "prompts.jsonl", num_steps=num_steps)

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = [workload.reward(*row, metadata={}) for row in zip(prompts, completions, answer, strict=True)]
        rewards.append(statistics.fmean(scores))
        return scores

    config = GRPOConfig(
        output_dir=str(folder / "output"),
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=num_steps,
        per_device_train_batch_size=workload.ROLLOUTS_PER_STEP // args.micro_batches,
        gradient_accumulation_steps=args.micro_batches,
        num_generations=workload.GROUP_SIZE,
        max_completion_length=workload.MAX_RESPONSE_TOKENS[args.workload],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # Fixed lengths need no processor of ours: this is the cheapest way TRL has.
        generation_kwargs={"suppress_tokens": [workload.PAD, workload.EOS]} if args.workload == "fixed" else None,
        shuffle_dataset=False,
        num_iterations=1,
        epsilon=workload.CLIP,
        scale_rewards="group",
        beta=args.beta,
        use_bias_correction_kl=False,
        optim="adamw_torch_fused",
        learning_rate=workload.LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=workload.MAX_GRAD_NORM,
        seed=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=str(directory),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_json(str(folder / "prompts.jsonl"), cache_dir=str(folder / "cache")),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )


def force_lengths(trainer: GRPOTrainer, which: workload.Workload) -> None:
    """Make every call of the policy's `generate` follow the workload's lengths, if they are not all the same.

    GRPOTrainer has no setting for logits processors, so its model's `generate` is wrapped.
    """
    if which == "fixed":
        return
    plain_generate = trainer.model.generate

    def generate(**kwargs: Any) -> torch.Tensor:
        lengths = workload.response_lengths(which, step=trainer.state.global_step + 1)
        processor = ForcedLengths(lengths, prompt_tokens=workload.PROMPT_TOKENS)
        return plain_generate(**kwargs, logits_processor=LogitsProcessorList([processor]))

    trainer.model.generate = generate


def result(args: argparse.Namespace, stopwatch: Stopwatch, rewards: list[float]) -> Mapping[str, Any]:
    """What is printed."""
    first = args.warmup_steps
    steps_s = stopwatch.steps_s(first)
    assert len(steps_s) == args.steps, f"{len(steps_s)} steps were timed, not {args.steps}"
    lengths = [sum(workload.response_lengths(args.workload, step + 1)) for step in range(first, first + args.steps)]
    generate, rollout = (stopwatch.phase_fraction(phase, first) for phase in ("generate", "rollout"))
    return {
        "trainer": "trl",
        "workload": args.workload,
        "beta": args.beta,
        "num_ranks": 1,
        "threads_per_rank": torch.get_num_threads(),
        "warmup_steps": args.warmup_steps,
        "steps_s": steps_s,
        "median_s": statistics.median(steps_s),
        "phase_fractions": {"generate": generate, "score": rollout - generate, "update": 1.0 - rollout},
        "response_tokens": statistics.fmean(lengths),
        "response_tokens_per_s": sum(lengths) / sum(steps_s),
        "reward_mean": statistics.fmean(rewards[first:]),
        "reward_first": statistics.fmean(rewards[:10]),
        "reward_last": statistics.fmean(rewards[-10:]),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "load_average": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers", "trl", "accelerate"]),
    }


if __name__ == "__main__":
    main()
