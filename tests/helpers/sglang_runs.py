"""Runs of ten steps with the real SGLang on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.small_run import finished_torchrun, rows

# Room for little: each engine looks at what is free as it starts, and others may start meanwhile.
LITTLE = {"memory_fraction": 0.5, "max_kv_tokens": 8192}
# What a machine without flashinfer can run, too.
BACKENDS: dict[str, Any] = {
    "attention_backend": "triton",
    "sglang": {"sampling_backend": "pytorch", "grammar_backend": "none"},
}


def ten_steps(folder: Path, num_ranks: int, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of ten steps of the configuration in `folder`, from the command line, after those of step 0."""
    settings = [
        "run.num_steps=10",
        "run.deterministic=false",
        "rollout.engine=sglang",
        *(f"rollout.{name}={value}" for name, value in LITTLE.items()),
        f"rollout.attention_backend={BACKENDS['attention_backend']}",
        *(f"rollout.sglang.{name}={value}" for name, value in BACKENDS["sglang"].items()),
    ]
    done = finished_torchrun(num_ranks, str(folder / "c.toml"), *settings, *overrides, timeout_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = rows(folder / "runs/run")
    assert [row["step"] for row in steps][-10:] == list(range(1, 11))
    return steps[-10:]


def require_learnt(steps: list[dict[str, Any]], *, mean_nats: float = 0.05) -> None:
    """The reward has risen, and the engine has sampled with the trainer's weights in every step.

    The means are of the mismatch in float32 or bfloat16, whose products SGLang's kernels round otherwise.
    """
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"]
    found = [row["mismatch/mean_abs_nats"] for row in steps]
    assert all(nats < mean_nats for nats in found), found
