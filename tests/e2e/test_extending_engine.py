"""The engine that the documentation shows, as it is printed there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.config import Config, read_config
from spmdrl.engine.kinds import engine_problems
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.types import UserError

PAGE = Path(__file__).parents[2] / "docs" / "extending-engine-section.md"
CONFIG = """\
[run]
name = "run"
dir = "{folder}"
num_steps = 2
deterministic = true
[model]
path = "{folder}/model"
[data]
max_prompt_tokens = 64
sources = [{{ kind = "reasoning_gym", task = "chain_sum", prompt_template = "{{metadata[expression]}} =" }}]
[rollout]
engine = "{engine}"
prompts_per_step = 4
group_size = 4
max_response_tokens = 6
[reward]
terms = [{{ kind = "function", function = "{folder}/replay.py:length" }}]
[optim]
lr = 1e-2
[pack]
max_tokens_per_micro_batch = 256
"""
REWARD = "\n\ndef length(*, prompt, response, answer, metadata):\n    return float(len(response))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "replay.py").write_text(source + REWARD)
    return tmp_path


def config(folder: Path, engine: str, *overrides: str) -> Config:
    path = folder / "c.toml"
    path.write_text(CONFIG.format(folder=folder, engine=engine))
    return read_config(Config, str(path), list(overrides))


def problems(cfg: Config) -> list[str]:
    return list(engine_problems(cfg, None, frozenset({1}), num_ranks=1, device_type="cpu"))


def test_the_engine_of_the_page_trains_a_model(folder: Path) -> None:
    save_tiny_model(folder / "model", num_layers=1)
    config(folder, f"{folder}/replay.py:Replay")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "-m", "spmdrl.train", str(folder / "c.toml")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["update/grad_norm"] > 0 for row in rows), "rewards differ within groups, so the policy learns"
    assert {row["rollout/truncated_fraction"] > 0 for row in rows} == {True}, "one answer is too long, and the rest end"


def test_an_engine_of_the_users_is_checked_like_the_others(folder: Path) -> None:
    engine = f"{folder}/replay.py:Replay"
    assert problems(config(folder, engine)) == []
    assert problems(config(folder, engine, "true_on_policy=true"))[0].startswith("true_on_policy = true needs")
    (refused,) = problems(config(folder, engine, "rollout.memory_fraction=0.5"))
    assert refused == f'rollout.memory_fraction has no meaning for rollout.engine = "{engine}"; remove it'
    (refused,) = problems(config(folder, engine, "rollout.placement=disaggregated", "rollout.num_ranks=1"))
    assert 'placement = "disaggregated" does not work with' in refused


def test_what_names_no_engine_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r'rollout.engine = "vlm" is not known; set it to "torch", "sglang", or to a'):
        config(folder, "vlm")
    (refused,) = problems(config(folder, f"{folder}/replay.py:Repaly"))
    assert "has no function or class Repaly; did you mean Replay?" in refused
    (refused,) = problems(config(folder, f"{folder}/replay.py:length"))
    assert "is not a subclass of spmdrl.engine.protocol.RolloutEngine" in refused
