"""Everything that the user gets wrong gets a sentence that names it, exit code 2, no traceback and no run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl import sft
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.train import main
from tests.helpers.models import longrope
from tests.helpers.small_run import write_sft_config, write_small_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_small_run(tmp_path, model={"hidden_size": 32, "num_layers": 1})
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"question": "2 + 2 ="}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": \n')
    (tmp_path / "text").mkdir()
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters/adapter_config.json").write_text("{}")
    (tmp_path / "counts.py").write_text(
        'class Counts:\n    def reset(self): self.n = 0\n    def up(self):\n        "Count."\n        self.n += 1\n'
    )
    return tmp_path


def source(path: str) -> str:
    return 'data.sources=[{{kind="jsonl",path="' + path + '"}}]'


CASES = {
    "unknown key": (["rollout.grup_size=8"], "did you mean rollout.group_size?"),
    "wrong type": (["rollout.group_size=many"], 'rollout.group_size = "many"'),
    "batch arithmetic": (["rollout.prompts_per_step=7", "loss.updates_per_step=2"], "set it to 6 or 8"),
    "no model": (["model.path={folder}/text"], "is not a model directory: it has no config.json"),
    "adapters as a model": (["model.path={folder}/adapters"], "set lora.path to it, and model.path to their"),
    "an environment that rewards nothing": (
        [
            'environment={{source={{kind="trl",name="{folder}/counts.py:Counts"}},max_turns=2}}',
            'reward.terms=[{{kind="environment"}}]',
        ],
        "has neither get_reward() nor an attribute reward, so that every reward would be 0",
    ),
    "empty data": ([source("{folder}/empty.jsonl")], "empty.jsonl"),
    "missing column": ([source("{folder}/rows.jsonl")], "rows.jsonl line 2"),
    "malformed row": ([source("{folder}/broken.jsonl")], "broken.jsonl line 2"),
    "no such file": ([source("{folder}/absent.jsonl")], "absent.jsonl"),
    "no such task": (['data.sources=[{{kind="reasoning_gym",task="chain_sun"}}]'], "chain_sum"),
    "no such reward": (['reward.terms=[{{kind="function",function="absent_module:f"}}]'], "absent_module"),
    "no such function": (['reward.terms=[{{kind="function",function="{folder}/reward.py:f"}}]'], "reward.py"),
    "no such optimizer": (["optim.name=adamm"], 'optim.name = "adamm"'),
    "optimizer arguments": (["optim.name=torch.optim:Adam", "optim.params={{bogus=1}}"], "does not work with these"),
    "settings of another optimizer": (["optim.momentum=0.9"], 'momentum has no meaning for name = "adamw"'),
    "a stop token that is none": (["rollout.stop_token_ids=[999]"], "not 999"),
    "a warm-up beyond the run": (["optim.warmup_steps=900"], "is longer than the run"),
    "a name that is a path": (["run.name=../x"], "run.name"),
    "too long for the model": (
        ["data.max_prompt_tokens=4000", "pack.max_tokens_per_micro_batch=9000"],
        "the model was made for 256",
    ),
    "a kernel that is not here": (["model.attention=varlen"], "needs a CUDA device"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_answered_with_a_sentence(folder: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, sentence = CASES[case]
    overrides = [override.format(folder=folder) for override in overrides]
    for dry_run in ([], ["--dry-run"]):
        assert main([str(folder / "c.toml"), *overrides, *dry_run]) == 2
        said = capsys.readouterr().err
        assert sentence in said
        assert "Traceback" not in said
        assert not list(folder.glob("runs/*/*.*"))  # at most empty folders


def test_mistakes_of_all_kinds_are_told_by_one_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "c.toml").read_text()
    lines = ["watchdog = { timeout = 1e9 }", 'export = { every = "often" }', "parallel = { tp = 3 }"]
    written = "\n".join([*lines, text])
    (folder / "c.toml").write_text(written)
    number = {line.split(" = ")[0]: at for at, line in enumerate(written.splitlines(), start=1)}
    overrides = [
        "rollout.group_size=1",
        "loss.kl_coef=0.1",
        "reward.kl_coef=0.1",
        "model.path=nowhere",
        "model.attention=varlen",
        "optim.name=adamm",
        source(f"{folder}/absent.jsonl").format(),
        "run.stop_before=2020-01-01",
    ]
    assert main([str(folder / "c.toml"), *overrides]) == 2
    first, *said = capsys.readouterr().err.splitlines()
    config, there = f"{folder}/c.toml", "on the command line: "
    expected = [
        f"{config}:{number['watchdog']}: watchdog.timeout: no such setting; did you mean watchdog.timeout_s?",
        f'{config}:{number["export"]}: export.every = "often": input should be a valid integer',
        f"{config}:{number['parallel']}: parallel.dp_replicate x cp x tp = 1 x 1 x 3 = 3 does not divide the 1 ranks",
        f'{there}rollout.group_size = 1 leaves advantage.estimator = "grpo"',
        f"{there}loss.kl_coef = 0.1 and reward.kl_coef = 0.1 would count",
        f'{there}model.path = "nowhere" does not exist',
        f'{there}model.attention = "varlen" needs a CUDA device',
        f'{there}optim.name = "adamm" is not known',
        f"{there}run.stop_before = 2020-01-01T00:00 is in the past",
        f"cannot read {folder}/absent.jsonl: No such file",
    ]
    assert first == "cannot start:"
    assert len(said) == len(expected) and all(map(str.startswith, said, (f"  - {one}" for one in expected))), said
    assert not (folder / "runs").exists()


def test_a_tokenizer_of_another_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    assert main([str(folder / "c.toml")]) == 2
    assert "the tokenizer belongs to another model" in capsys.readouterr().err


def test_rows_that_cannot_be_imitated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No step comes to them: the first are fine, and one that is held out needs no answer while nothing reads it."""
    said = [{"role": role, "content": "1 + 1 ="} for role in ("user", "assistant")]
    config = write_sft_config(
        folder,
        model={"path": f"{folder}/chat"},
        data={"sources": [{"kind": "jsonl", "path": f"{folder}/said.jsonl", "answer_column": ""}]},
        sft={"sequences_per_step": 1, "max_response_tokens": 8},
    )
    save_tiny_model(folder / "chat", hidden_size=32, num_layers=1, chat=True)
    for last, settings, sentence in (
        (said[:1], [], "said.jsonl line 3: there is no response to imitate"),
        (
            [said[0], {"role": "assistant", "content": "2" * 9}],
            [],
            "line 3: an answer has 10 tokens, more than sft.max",
        ),
        ([said[0], {"role": "assistant", "content": "2" * 9}], ["data.overlong=drop"], None),
    ):
        rows = [said, said, last]
        (folder / "said.jsonl").write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        code = sft.main([str(config), "data.max_prompt_tokens=40", *settings, "--dry-run"])
        told = capsys.readouterr()
        assert code == (0 if sentence is None else 2), told
        assert sentence is None or sentence in told.err, told.err


def test_weights_that_do_not_belong_to_the_config(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "model/config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    (folder / "model/config.json").write_text(json.dumps(config))
    assert main([str(folder / "c.toml")]) == 2
    assert "lacks 11 of the weights" in capsys.readouterr().err


def test_a_config_that_makes_no_sense(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | {"hidden_size": "abc"}))
    assert main([str(folder / "c.toml")]) == 2
    assert "is not a causal language model" in capsys.readouterr().err


def test_responses_that_would_change_their_rotary_frequencies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | longrope(10, num_factors=config["head_dim"] // 2)))
    assert main([str(folder / "c.toml")]) == 2
    assert "beyond 10 this model (qwen3) has other rotary frequencies" in capsys.readouterr().err


def test_weights_that_were_cut_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = (folder / "model/model.safetensors").read_bytes()
    (folder / "model/model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert main([str(folder / "c.toml")]) == 2
    assert "weights cannot be read" in capsys.readouterr().err


def test_a_run_cannot_export_over_its_own_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs/run").mkdir(parents=True)
    (folder / "model").rename(folder / "runs/run/hf")
    assert main([str(folder / "c.toml"), f"model.path={folder}/runs/run/hf"]) == 2
    assert "export its own model" in capsys.readouterr().err


def test_a_world_size_that_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder / "c.toml"), "--dry-run", "--ranks", "3"]) == 2
    assert "cannot be split over 3 ranks; set it to 6 or 12" in capsys.readouterr().err


def test_commands_refuse_wrong_settings_before_they_import_torch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "first").mkdir()
    (folder / "first/torch.py").write_text("raise RuntimeError('it takes seconds')")
    environment = os.environ | {"PYTHONPATH": f"{folder}/first:{os.environ.get('PYTHONPATH', '')}"}
    before = {*folder.rglob("*")}
    given = [str(folder / "c.toml"), "rollout.grup_size=8", "optim.lr=-1"]
    assert main(given) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 3 and "did you mean rollout.group_size?" in said
    for program, settings, sentence in (
        (["spmdrl.train"], given, said),
        (["spmdrl.tools.local", "spmdrl.train"], given, said),
        (["spmdrl.tools.local", "train", "--nproc=3"], given[:1], "cannot be split over 3 ranks; set it to 6 or 12"),
        (["spmdrl.tools.demo"], ["run.num_steps=2"], "optim.warmup_steps = 5 is longer than the run"),
    ):
        command = [sys.executable, "-m", *program, *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=folder)
        assert (done.returncode, done.stdout) == (2, "") and sentence in done.stderr, done.stderr
    assert {*folder.rglob("*")} == before


def test_dry_run_prints_what_would_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder / "c.toml"), "--dry-run", "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    assert "prompts_per_rank = 4" in said and "group_size = 4" in said and "reward of its reference answer" in said
    assert not (folder / "runs").exists()
