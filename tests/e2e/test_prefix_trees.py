"""Whole runs on prefix trees are those on whole sequences but for rounding: metrics of each step, and weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from spmdrl import pairs, sft, train
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.models import save_qwen3_moe
from tests.helpers.pair_runs import write_pairs_run
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import rows, weights, without_curves, write_config, write_sft_config

QUESTION = "What is the sum of these two digits? "
SUMS = [(a, b) for a in range(10) for b in range(9)]
TABLES: dict[str, Any] = {
    "data": {"max_prompt_tokens": 64},
    "pack": {"max_tokens_per_micro_batch": 1024},
    "optim": {"name": "sgd", "momentum": 0.0, "lr": 0.05},  # a rounding error stays one
    "report": {"tensorboard": False},
}
HINTED = {
    "models": {"big": {"path": "{folder}/teacher"}},
    "distill": {"teacher": "big", "divergence": "forward", "hint_column": "answer", "max_hint_tokens": 16},
    "advantage": {"estimator": "none"},
    "reward": {"terms": []},
    "loss": {"kl_coef": 0.0},
}
# Runs that sample: their number of ranks, and tables.
SAMPLING: dict[str, tuple[int, dict[str, Any]]] = {
    "rewards": (2, {}),
    "critic": (1, {"advantage": {"estimator": "gae"}, "reward": {"kl_coef": 0.01}, "loss": {"kl_coef": 0.0}}),
    "teacher": (1, HINTED),
    "sampled tokens of a teacher": (1, HINTED | {"distill": {"teacher": "big", "divergence": "sampled_kl"}}),
    "routes": (1, {"correction": {"router_replay": "R2"}}),
}
Program = Callable[[list[str]], int]


def write_run(folder: Path, kind: str) -> tuple[Program, int, Path]:
    """Write what a run of this kind reads; returns its program, its ranks and its configuration."""
    save_tiny_model(folder / "model", num_layers=1)
    if kind == "pairs":
        config = write_pairs_run(folder, **(TABLES | {"data": {"max_prompt_tokens": 64}}))
        _put_before_prompts(folder / "train.jsonl", folder / "held-out.jsonl")
        return pairs.main, 1, config
    if kind == "fine-tuning":
        answers = [{"prompt": f"{QUESTION}{a} + {b} =", "response": f" {a + b}"} for a, b in SUMS]
        (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
        columns = {"answer_column": "", "response_column": "response"}
        source = {"kind": "jsonl", "path": f"{folder}/sft.jsonl", **columns}
        tuning = {"sequences_per_step": 16, "max_response_tokens": 6}
        tables = TABLES | {"data": {"max_prompt_tokens": 64, "sources": [source]}, "sft": tuning}
        return sft.main, 1, write_sft_config(folder, **tables)
    if kind == "routes":
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        save_qwen3_moe(folder / "model", vocab_size=len(tokenizer), num_experts=8, **ids)
    if "teacher" in kind:
        save_tiny_model(folder / "teacher", num_layers=2, seed=5)
    sums = [{"prompt": f"{QUESTION}{a} + {b} =", "answer": f"{a + b}"} for a, b in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    num_ranks, tables = SAMPLING[kind]
    tables = json.loads(json.dumps(tables).replace("{folder}", str(folder)))
    source = {"kind": "jsonl", "path": f"{folder}/sums.jsonl"}
    data = {"max_prompt_tokens": 64, "sources": [source]}
    return train.main, num_ranks, write_config(folder, **(TABLES | {"data": data, "eval": None} | tables))


def _put_before_prompts(*paths: Path) -> None:
    for path in paths:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        written = (json.dumps(record | {"prompt": QUESTION + record["prompt"]}) + "\n" for record in records)
        path.write_text("".join(written))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*SAMPLING, "fine-tuning", "pairs"])
def test_a_run_on_prefix_trees_is_the_one_on_whole_sequences(kind: str, tmp_path: Path) -> None:
    program, num_ranks, config = write_run(tmp_path, kind)
    for setting in ("off", "auto"):
        argv = [str(config), f"run.dir={tmp_path}", f"run.name={setting}", f"pack.prefix_tree={setting}"]
        assert set(run_ranks(num_ranks, without_curves, program, argv, timeout_s=400.0)) == {0}
    flat, trees = (rows(tmp_path / name) for name in ("off", "auto"))
    steps = [row for row in trees if "batch/shared_fraction" in row]
    assert len(steps) == 4 and all(row["batch/shared_fraction"] > 0.3 for row in steps)
    areas = (
        "reward",
        "rollout",
        "update",
        "loss",
        "advantage",
        "mismatch",
        "critic",
        "distill",
        "pairs",
        "eval",
        "sft",
    )
    for one, other in zip(flat, trees, strict=True):
        names = [name for name in one if name.split("/")[0] in areas]
        assert len(names) > 3 or one["step"] == 0
        for name in [*names, *({"batch/loss_tokens"} & one.keys())]:
            near = one[name] if one[name] is None else pytest.approx(one[name], rel=1e-3, abs=1e-5)
            assert other[name] == near, (one["step"], name)
    expected, found = weights(tmp_path / "off"), weights(tmp_path / "auto")
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)
