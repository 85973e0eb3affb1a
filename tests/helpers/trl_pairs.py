"""Train on pairs, or from a teacher, with TRL in its own environment: `python trl_pairs.py JOB.json`, by
tests/spmd/test_trl_pairs.py.

Every step takes all rows, so that their order does not matter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    RewardConfig,
    RewardTrainer,
)

TRAINERS = {
    "pairs": (DPOTrainer, DPOConfig),
    "rewards": (RewardTrainer, RewardConfig),
    "distillation": (DistillationTrainer, DistillationConfig),
}


def recorded(trainer: type[DistillationTrainer], rows: list[dict[str, str]]) -> type[DistillationTrainer]:
    """Make a trainer from answers in rows: the student samples nothing."""

    class Recorded(trainer):
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: object, **__: object) -> list[list[int]]:
            tokenizer = self.processing_class
            said = {
                tuple(tokenizer(row["prompt"])["input_ids"]): tokenizer(row["response"], add_special_tokens=False)[
                    "input_ids"
                ]
                for row in rows
            }
            return [[*said[tuple(ids)], tokenizer.eos_token_id] for ids in prompt_ids]

    return Recorded


def main(job_file: str) -> None:
    """Train for some steps of SGD, and save the model and the loss of each step."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in Path(job["rows"]).read_text(encoding="utf-8").splitlines()]
    trainer, config = TRAINERS[job["trainer"]]
    others = {}
    if job["trainer"] == "distillation":
        trainer, others = recorded(trainer, rows), {"teacher_model": job["teacher"]}
    arguments = config(
        output_dir=f"{job['out']}/trl",
        max_steps=job["num_steps"],
        per_device_train_batch_size=len(rows),
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        optim="sgd",
        weight_decay=0.0,
        max_grad_norm=1e9,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        **job["settings"],
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    training = trainer(
        model=job["model"],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **others,
    )
    training.train()
    training.model.save_pretrained(f"{job['out']}/hf")
    losses = [row["loss"] for row in training.state.log_history if "loss" in row]
    (Path(job["out"]) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
