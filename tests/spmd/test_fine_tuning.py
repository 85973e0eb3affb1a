"""A whole fine-tuning run on two ranks: what it says about memory."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

from spmdrl.sft import main
from spmdrl.tools.tiny_model import save_tiny_model
from tests.spmd.ranks import run_ranks

CONFIG = """\
[run]
name = "run"
dir = "{folder}"
num_steps = 2
[model]
path = "{folder}/model"
[data]
max_prompt_tokens = 24
[[data.sources]]
kind = "reasoning_gym"
task = "chain_sum"
params = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }}
prompt_template = "{{metadata[expression]}} ="
[sft]
sequences_per_step = 8
max_response_tokens = 8
[optim]
lr = 1e-2
[pack]
max_tokens_per_micro_batch = 64
[checkpoint]
every = 1
[report]
console = "plain"
tensorboard = false
"""


def _fine_tuned(config: Path) -> tuple[int, str]:
    """Exit code and what a rank printed."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main([str(config)])
    return code, printed.getvalue()


def test_every_phase_of_a_run_is_predicted_and_measured_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_layers=1, spare_tokens=1)
    (tmp_path / "c.toml").write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    (code, shown), (_, silent) = run_ranks(2, _fine_tuned, tmp_path / "c.toml")
    assert code == 0 and not silent
    lines = shown.splitlines()
    compared = [line.split() for line in lines if line.startswith("  ") and "predicted" not in line]
    assert [row[0] for row in compared] == ["load", "update", "save", "export"]
    assert all(float(size) > 0 for _, *sizes in compared for size in sizes)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [{name for name in row if name.startswith("memory/")} for row in rows]
    overall = {"memory/peak_gib", "memory/host_peak_gib", "memory/update_peak_gib"}
    # The first step comes after loading; what is saved after a step is the next one's.
    assert measured == [overall | {"memory/load_peak_gib"}, overall | {"memory/save_peak_gib"}]
    loaded = next(line for line in lines if line.startswith("loaded on 2 ranks")).split()[-2:]
    assert max(map(float, loaded)) >= float(compared[0][2])
