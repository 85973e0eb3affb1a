"""Train on pairs with TRL, in its own environment: `python trl_pairs.py JOB.json`, by tests/spmd/test_trl_pairs.py.

Every step takes all pairs, so that no order of rows matters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer


def main(job_file: str) -> None:
    """Train for some steps of SGD, and save the model and the loss of each step."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in Path(job["rows"]).read_text(encoding="utf-8").splitlines()]
    trainer, config = (RewardTrainer, RewardConfig) if job["rewards"] else (DPOTrainer, DPOConfig)
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
        model=job["model"], args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    training.train()
    training.model.save_pretrained(f"{job['out']}/hf")
    losses = [row["loss"] for row in training.state.log_history if "loss" in row]
    (Path(job["out"]) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
