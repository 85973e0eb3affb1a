"""A whole fine-tuning run on two ranks: what it says about memory."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from spmdrl.sft import main
from spmdrl.tools.tiny_model import save_tiny_model
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import rows, write_sft_config

SOURCE = {
    "kind": "reasoning_gym",
    "task": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "prompt_template": "{metadata[expression]} =",
}


def _fine_tuned(config: Path) -> tuple[int, str]:
    """Exit code and what a rank printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([str(config)])
    return code, printed.getvalue()


def test_the_held_out_loss_does_not_depend_on_the_ranks_and_falls(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_layers=1, spare_tokens=1)
    held_out = {"num_prompts": 7, "every": 2, "sources": [SOURCE]}
    shared = {"sft": {"sequences_per_step": 8, "max_response_tokens": 8}, "held_out": held_out}
    for ranks in (1, 2):
        write_sft_config(tmp_path, run={"name": f"on-{ranks}", "dir": str(tmp_path), "num_steps": 4}, **shared)
        codes = run_ranks(ranks, _fine_tuned, tmp_path / "c.toml")
        assert {code for code, _ in codes} == {0}
    alone, together = (
        {row["step"]: row["eval/loss"] for row in rows(tmp_path / f"on-{ranks}") if "eval/loss" in row}
        for ranks in (1, 2)
    )
    assert list(alone) == list(together) == [0, 2, 4]
    assert list(together.values()) == pytest.approx(list(alone.values()), rel=1e-4)
    assert alone[0] > alone[2] > alone[4]


def test_every_phase_of_a_run_is_predicted_and_measured_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_layers=1, spare_tokens=1)
    write_sft_config(
        tmp_path,
        run={"dir": str(tmp_path), "num_steps": 2, "seed": None, "deterministic": None, "threads_per_rank": None},
        sft={"sequences_per_step": 8, "max_response_tokens": 8},
        pack={"max_tokens_per_micro_batch": 64},
        checkpoint={"every": 1},
        report={"console": "plain", "tensorboard": False},
    )
    (code, shown), (_, silent) = run_ranks(2, _fine_tuned, tmp_path / "c.toml")
    assert code == 0 and not silent
    lines = shown.splitlines()
    compared = [line.split() for line in lines if line.startswith("  ") and "predicted" not in line]
    assert [row[0] for row in compared] == ["load", "update", "save", "export"]
    assert all(float(size) > 0 for _, *sizes in compared for size in sizes)
    measured = [{name for name in row if name.startswith("memory/")} for row in rows(tmp_path / "run")]
    phases = {f"memory/{name}_peak_gib" for name in ("host", "logprobs", "update")}
    overall = {"memory/peak_gib", *phases}
    # The first step comes after loading; what is saved after a step is the next one's.
    assert measured == [overall | {"memory/load_peak_gib"}, overall | {"memory/save_peak_gib"}]
    loaded = next(line for line in lines if line.startswith("loaded on 2 ranks")).split()[-2:]
    assert max(map(float, loaded)) >= float(compared[0][2])
