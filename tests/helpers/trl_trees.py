"""Fold samples into TRL's tree rows and compute its loss, in its own environment: `python trl_trees.py JOB.json ...`.

The one thing that is replaced is the kernel, FlashAttention 3: the same function in plain torch, for a CPU.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.trainer.utils import add_fused_lm_head


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, softmax_scale: float, **others: Any
) -> Tensor:
    """Attend as FlashAttention does to runs of tokens: a run's last query sees all of its keys."""
    assert others.pop("causal") and others == {"window_size": (-1, -1)}
    parts = []
    of_runs = (x.split(cu.diff().tolist()) for x, cu in ((query, cu_q), (key, cu_k), (value, cu_k)))
    for q, k, v in zip(*of_runs, strict=True):
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=softmax_scale, enable_gqa=True)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)


class Trainer(SimpleNamespace):
    """A stand-in for the trainer, with all that TRL's loss reads of it."""

    def __getattr__(self, name: str) -> float:
        return 0.0


def measure(job_file: str) -> None:
    """Write the columns of a row that has all samples, its terms' log-probabilities, its loss and the gradients."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    row = packing.TreeRow()
    for sample in job["samples"]:
        row.add({name: torch.tensor(x) if isinstance(x, list) else x for name, x in sample.items()})
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], attn_implementation=packing.TREE_ATTENTION, dtype=torch.float32
    )
    add_fused_lm_head(model, temperature=job["temperature"], outputs=("log_probs", "entropy"))
    collator = async_grpo_trainer.DataCollatorForRollout(pad_token_id=0)
    noted: dict[str, Any] = {}

    def forward(**inputs: Any) -> Any:
        noted["outputs"] = model(**inputs)
        return noted["outputs"]

    inputs = collator([[row]])
    accelerator = SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x)
    trainer = Trainer(
        accelerator=accelerator,
        aux_loss_enabled=False,
        epsilon_low=job["epsilon"],
        epsilon_high=job["epsilon"],
        current_gradient_accumulation_steps=1,
        _metrics={"train": defaultdict(list)},
    )
    loss = AsyncGRPOTrainer.compute_loss(trainer, forward, inputs)
    loss.backward()
    columns = {name: x[0] for name, x in inputs.items()}
    columns |= {"logprobs": noted["outputs"].log_probs.flatten()[columns["token_index"]], "loss": loss}
    save_file({name: p.grad for name, p in model.named_parameters()}, f"{job['out']}/gradients.safetensors")
    found = json.dumps({name: x.tolist() for name, x in columns.items()})
    Path(job["out"], "found.json").write_text(found, encoding="utf-8")


if __name__ == "__main__":
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen)
    packing.register_tree_attention()
    for job in sys.argv[1:]:
        measure(job)
