"""Small runs of `spmdrl.pairs`."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from spmdrl.pairs import main
from tests.helpers.small_run import without_curves, write_sft_config


def preferring(argv: list[str]) -> tuple[int, str]:
    """Exit code and what a rank printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = without_curves(main, argv)  # type: ignore[arg-type]
    return code, printed.getvalue()


def write_pairs_run(folder: Path, *, name: str = "c.toml", **tables: Any) -> Path:
    """Write sums with a right and a wrong answer, of which ten are held out, and the configuration of a run on them."""
    pairs = [
        {"prompt": f"{a} + {b} =", "chosen": f" {a + b}", "rejected": " no" if a < b else f" {a + b + 1}, I guess"}
        for a in range(10)
        for b in range(10)
    ]
    for file, part in (("train", pairs[10:]), ("held-out", pairs[:10])):
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in part))
    changed: dict[str, Any] = {
        "run": {"dir": str(folder), "num_steps": 4},
        "data": {"sources": [{"kind": "jsonl", "path": f"{folder}/train.jsonl"}]},
        "held_out": {
            "num_prompts": 10,
            "every": 2,
            "sources": [{"kind": "jsonl", "path": f"{folder}/held-out.jsonl"}],
        },
        "pairs": {"pairs_per_step": 8, "max_response_tokens": 16},
        "optim": {"lr": 1e-3},
        "report": {"tensorboard": False},
    }
    for key, table in tables.items():
        changed[key] = table if table is None else changed.get(key, {}) | table
    return write_sft_config(folder, name=name, **changed)
