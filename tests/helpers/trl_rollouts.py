"""Train on recorded rollouts with TRL, in its own environment: `python trl_rollouts.py JOB.json ...`, for a test.

Every generation is a recorded step, in its order, and an optimizer step takes all of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class Recorded(GRPOTrainer):
    """Notes the advantages of each generation."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        self.noted.append(made["advantages"].tolist())
        return made


def train(job_file: str) -> None:
    """Train on each recorded step for some iterations; save the model, the advantages and what was logged."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    steps, size = iter(job["steps"]), job["group_size"]
    num_rollouts, num_steps = len(job["steps"][0]), len(job["steps"])

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        rollouts = next(steps)
        assert len(prompts) == len(rollouts)
        return {name: [rollout[name] for rollout in rollouts] for name in rollouts[0]}

    def reward(recorded_reward: list[float], **_: Any) -> list[float]:
        return recorded_reward

    config = GRPOConfig(
        output_dir=f"{job['out']}/trl",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        max_steps=num_steps * job["num_iterations"],
        num_iterations=job["num_iterations"],
        per_device_train_batch_size=num_rollouts,
        num_generations=size,
        max_completion_length=job["max_response_tokens"],
        temperature=1.0,
        shuffle_dataset=False,
        optim="sgd",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=job["max_grad_norm"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **job["settings"],
    )
    rows = [{"prompt": f"{i}"} for i in range(num_rollouts // size * num_steps)]
    trainer = Recorded(
        model=job["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        rollout_func=recorded,
    )
    trainer.noted = []
    trainer.train()
    trainer.model.save_pretrained(f"{job['out']}/hf")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    found = {"advantages": trainer.noted, **{name: [row[name] for row in logged] for name in ("loss", "grad_norm")}}
    (Path(job["out"]) / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    for job in sys.argv[1:]:
        train(job)
