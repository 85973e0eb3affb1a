"""Time training steps of TRL's GRPOTrainer on workload W, in its fastest configuration on a CPU; with a teacher of
its DistillationTrainer.

    .venv-trl/bin/python benchmarks/trl_step.py --workload fixed --beta 0

One process, or several with DDP under torchrun: float32, SDPA, plain `generate`, no gradient checkpointing, fused
AdamW, all of a process's rollouts in one micro-batch. Runs in an environment of its own (`benchmarks/run.sh`) and knows
nothing of spmdrl; TRL is imported where it is used. Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import workload
from generate_peer import ForcedLengths
from transformers import AutoTokenizer, LogitsProcessorList, TrainerCallback

StepScores = tuple[float, int]  # of one rank's rollouts: mean reward, response tokens


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
    """Train, print one JSON object on the first rank."""
    args = workload.parse_step_arguments(__doc__.splitlines()[0])
    workload.use_best_environment(threads=args.threads, ranks=args.ranks)
    torch.set_num_threads(args.threads)
    stopwatch, scores = Stopwatch(), list[StepScores]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(args, Path(folder), scores)
        force_lengths(trainer, args)
        trainer.model.generate = stopwatch.timed("generate", trainer.model.generate)
        trainer._generate_and_score_completions = stopwatch.timed("rollout", trainer._generate_and_score_completions)
        trainer.add_callback(StepEnds(stopwatch))
        trainer.train()
        everyones = [scores for _rank, scores in sorted(gather([(trainer.accelerator.process_index, scores)]))]
    if trainer.accelerator.is_main_process:
        print(json.dumps(result(args, stopwatch, everyones)))


def gather(own: list[Any]) -> list[Any]:
    """The lists of all ranks, end to end."""
    from accelerate.utils import gather_object

    return list(gather_object(own))


def build_trainer(args: argparse.Namespace, folder: Path, scores: list[StepScores]) -> Any:
    """The trainer in its fastest configuration; what this rank sampled in each step is appended to `scores`."""
    directory = workload.build_model_directory(folder / "model", size=args.size)
    num_steps, num_prompts = args.warmup_steps + args.steps, workload.prompts_per_step(args)
    workload.write_prompts(folder / "prompts.jsonl", num_steps=num_steps, count=num_prompts)
    common = {
        "output_dir": str(folder / "output"),
        "model_init_kwargs": {"dtype": "float32", "attn_implementation": "sdpa"},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": num_steps,
        "ddp_backend": "gloo" if args.ranks > 1 else None,
        "per_device_train_batch_size": num_prompts * workload.GROUP_SIZE // args.ranks,
        "gradient_accumulation_steps": 1,
        "max_completion_length": workload.MAX_RESPONSE_TOKENS[args.workload],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        # Fixed lengths need no processor of ours: this is the cheapest way TRL has.
        "generation_kwargs": {"suppress_tokens": [workload.PAD, workload.EOS]} if args.workload == "fixed" else None,
        "shuffle_dataset": False,
        "optim": "adamw_torch_fused",
        "learning_rate": workload.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": workload.MAX_GRAD_NORM,
        "seed": 0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    build = distillation_trainer if args.teacher_layers else grpo_trainer
    return build(args, folder, directory, common, scores)


def grpo_trainer(
    args: argparse.Namespace, folder: Path, directory: Path, common: dict[str, Any], scores: list[StepScores]
) -> Any:
    """GRPO from the workload's reward."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        rewards = [workload.reward(*row, metadata={}) for row in zip(prompts, completions, answer, strict=True)]
        scores.append((statistics.fmean(rewards), sum(map(len, completion_ids))))
        return rewards

    config = GRPOConfig(
        **common,
        num_generations=workload.GROUP_SIZE,
        num_iterations=1,
        epsilon=workload.CLIP,
        scale_rewards="group",
        beta=args.beta,
        use_bias_correction_kl=False,
    )
    return GRPOTrainer(
        model=str(directory),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_json(str(folder / "prompts.jsonl"), cache_dir=str(folder / "cache")),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )


def distillation_trainer(
    args: argparse.Namespace, folder: Path, directory: Path, common: dict[str, Any], scores: list[StepScores]
) -> Any:
    """The reverse divergence from a teacher over the whole vocabulary; it samples one response to each row."""
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    class Counting(DistillationTrainer):
        """Counts the tokens of what was sampled."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            scores.append((0.0, int(made["completion_mask"].sum())))
            return made

    teacher = workload.build_model_directory(folder / "teacher", size=args.size, teacher_layers=args.teacher_layers)
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    rows = [{"prompt": prompt} for prompt in prompts for _ in range(workload.GROUP_SIZE)]
    return Counting(
        model=str(directory),
        teacher_model=str(teacher),
        args=DistillationConfig(**common, teacher_model_init_kwargs=common["model_init_kwargs"], beta=1.0),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )


def force_lengths(trainer: Any, args: argparse.Namespace) -> None:
    """Make every call of the policy's `generate` follow the workload's lengths, if they are not all the same.

    Its trainers have no setting for logits processors, so the model's `generate` is wrapped.
    """
    if args.workload != "tail":
        return
    num_prompts, rank = workload.prompts_per_step(args), trainer.accelerator.process_index
    share = num_prompts * workload.GROUP_SIZE // args.ranks  # the rows of a rank lie together
    plain_generate = trainer.model.generate

    def generate(**kwargs: Any) -> torch.Tensor:
        lengths = workload.response_lengths("tail", step=trainer.state.global_step + 1, num_prompts=num_prompts)
        mine = lengths[rank * share : (rank + 1) * share]
        processor = ForcedLengths(mine, prompt_tokens=workload.PROMPT_TOKENS)
        return plain_generate(**kwargs, logits_processor=LogitsProcessorList([processor]))

    trainer.model.generate = generate


def result(args: argparse.Namespace, stopwatch: Stopwatch, everyones: list[list[StepScores]]) -> Mapping[str, Any]:
    """Make the object that is printed, with phases as they were on this rank."""
    first = args.warmup_steps
    generate, rollout = (stopwatch.phase_fraction(phase, first) for phase in ("generate", "rollout"))
    steps = list(zip(*everyones, strict=True))
    return workload.step_result(
        args,
        trainer="trl",
        steps_s=stopwatch.steps_s(first),
        response_tokens=[sum(tokens for _, tokens in ranks) for ranks in steps],
        rewards=[statistics.fmean(reward for reward, _ in ranks) for ranks in steps],
        phase_fractions={"generate": generate, "score": rollout - generate, "update": 1.0 - rollout},
        packages=["torch", "transformers", "trl", "accelerate"],
    )


if __name__ == "__main__":
    main()
