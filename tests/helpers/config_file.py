"""A good configuration file, which a test spoils, and what reading it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmdrl.config import Config, read_config
from spmdrl.types import UserError

GOOD = """\
[run]
name = "x"
num_steps = 3
[model]
path = "m"
[data]
max_prompt_tokens = 8
[[data.sources]]
kind = "jsonl"
path = "a.jsonl"
[[data.sources]]
kind = "reasoning_gym"
task = "chain_sum"
[rollout]
prompts_per_step = 4
group_size = 2
max_response_tokens = 5
[reward]
terms = [{ kind = "exact" }, { kind = "function", function = "a:b", weight = 0.5 }]
[optim]
lr = 1e-3
[pack]
max_tokens_per_micro_batch = 64
"""


def read(tmp_path: Path, text: str = GOOD, *overrides: str) -> Config:
    (tmp_path / "c.toml").write_text(text)
    return read_config(Config, str(tmp_path / "c.toml"), overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        read(tmp_path, text, *overrides)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()
