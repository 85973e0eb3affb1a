"""An engine of the user's is checked before it starts, as the built-in ones are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spmdrl.config import Config, read_config, read_draft
from spmdrl.config.engines import engine_facts
from spmdrl.engine.start import engine_problems
from spmdrl.types import UserError

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    section = PAGE.read_text(encoding="utf-8").split("\n## An engine\n", 1)[1]
    (source,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "replay.py").write_text(source + "\n\nlength = len\n")
    return tmp_path


def config(folder: Path, engine: str, *overrides: str) -> Config:
    path = folder / "c.toml"
    path.write_text(CONFIG.format(folder=folder, engine=engine))
    return read_config(Config, str(path), list(overrides))


def problems(cfg: Config) -> list[str]:
    return list(engine_problems(cfg, None, frozenset({1}), num_ranks=1, device_type="cpu"))


def test_an_engine_of_the_users_is_checked_like_the_others(folder: Path) -> None:
    engine = f"{folder}/replay.py:Replay"
    assert problems(config(folder, engine)) == []
    assert problems(config(folder, engine, "true_on_policy=true"))[0].startswith("true_on_policy = true needs")
    (refused,) = problems(config(folder, engine, "rollout.memory_fraction=0.5"))
    assert refused == f'rollout.memory_fraction has no meaning for rollout.engine = "{engine}"; remove it'
    (refused,) = problems(config(folder, engine, "rollout.placement=disaggregated", "rollout.num_ranks=1"))
    assert 'placement = "disaggregated" does not work with' in refused
    (refused,) = problems(config(folder, engine, "correction.router_replay=R3"))
    assert f'rollout.engine = "{engine}" reports no routes; set it to "R2"' in refused
    (refused,) = problems(config(folder, engine, "rollout.top_k=8"))
    assert f'left, and rollout.engine = "{engine}" does not report them; set rollout.engine = "torch"' in refused
    in_flight = ("rollout.partial=true", "rollout.refit_in_flight=true")
    refused = problems(config(folder, engine, "rollout.placement=disaggregated", "rollout.num_ranks=1", *in_flight))
    assert any("does not say that it can go on with them after a refit" in sentence for sentence in refused)


def test_what_names_no_engine_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r'rollout.engine = "vlm" is not known; set it to "torch", "sglang", or to a'):
        config(folder, "vlm")
    with pytest.raises(UserError) as raised:
        engine_facts("vlm")
    sentences = [str(raised.value)]
    draft = read_draft(Config, str(folder / "c.toml"), ["rollout.engine=vlm"])
    with pytest.raises(UserError) as refusal:  # once, whoever asks
        draft.refuse(sentences)
    assert "\n" not in str(refusal.value)
    (refused,) = problems(config(folder, f"{folder}/replay.py:Repaly"))
    assert "has no function or class Repaly; did you mean Replay?" in refused
    (folder / "half.py").write_text(
        "from spmdrl.engine.protocol import RolloutEngine\nclass Half(RolloutEngine): ...\n"
    )
    (refused,) = problems(config(folder, f"{folder}/half.py:Half"))
    assert "lacks generate and load, which every engine defines" in refused
    (refused,) = problems(config(folder, f"{folder}/replay.py:length"))
    assert "is not a subclass of spmdrl.engine.protocol.RolloutEngine" in refused
