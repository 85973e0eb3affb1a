"""The exported model of a run, evaluated."""

from __future__ import annotations

from pathlib import Path

from spmdrl.algo.metrics import scalars
from spmdrl.config import Config, read_config
from spmdrl.preflight.hub import with_files_here
from spmdrl.step.evaluate import eval_metrics
from spmdrl.tools.evaluate import answers


def evaluate_export(run: Path) -> dict[str, float]:
    """Load RUN/hf into an engine and evaluate it on the run's held-out prompts."""
    cfg = with_files_here(read_config(Config, str(run / "config.toml"), []))
    return scalars(eval_metrics(answers(cfg, run / "hf"), success_at=cfg.success_at))
