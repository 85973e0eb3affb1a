"""The exported model of a run, evaluated, and an evaluation set in the cache of the hub."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pyarrow
import pytest
from pyarrow import parquet

from spmdrl.algo.metrics import scalars
from spmdrl.config import Config, read_config
from spmdrl.preflight.hub import with_files_here
from spmdrl.step.evaluate import eval_metrics
from spmdrl.tools.evaluate import answers


def evaluate_export(run: Path) -> dict[str, float]:
    """Load RUN/hf into an engine and evaluate it on the run's held-out prompts."""
    cfg = with_files_here(read_config(Config, str(run / "config.toml"), []))
    return scalars(eval_metrics(answers(cfg, run / "hf"), success_at=cfg.success_at))


def cached_gsm8k(folder: Path, monkeypatch: pytest.MonkeyPatch, **splits: list[dict[str, str]]) -> Path:
    """Write these splits where huggingface_hub looks for GSM8K; return their folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "cache"))
    cached = folder / "cache/datasets--openai--gsm8k"
    snapshot = cached / "snapshots" / ("a" * 40) / "main"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("a" * 40)
    for split, part in splits.items():
        parquet.write_table(pyarrow.Table.from_pylist(part), snapshot / f"{split}-00000-of-00001.parquet")
    return snapshot
