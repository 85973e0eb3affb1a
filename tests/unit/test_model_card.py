"""A model card says what the run's folder says, without a path of this machine; `--push` sends it with the model."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tomlkit

from spmdrl.preflight.hub import require_writable, send
from spmdrl.tools.export import main, model_card
from spmdrl.types import UserError
from tests.helpers.recorded import SEEDS

CACHED = "/home/me/.cache/hub/models--Qwen--Qwen3-0.6B/snapshots/0123456789abcdef"


def test_the_card_has_what_the_run_has(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shutil.copytree(SEEDS[0], run)
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(
        "\n".join(f'path = "{CACHED}"' if line.startswith("path = ") else line for line in config.splitlines())
    )
    card = model_card(run, step=60)
    assert 'base_model: "Qwen/Qwen3-0.6B"\n' in card and "`Qwen/Qwen3-0.6B@0123456789abcdef` after 60 steps" in card
    assert "/home/me" not in card and str(tmp_path) not in card
    assert "| reward/mean |" in card and "- spell_backward (reasoning_gym)" in card and "optim.lr = " in card
    assert "watchdog." not in card
    before = model_card(run, step=20)
    assert "at step 20 |" in before and "at step 60 |" not in before


def test_the_card_names_no_address_and_no_folder(tmp_path: Path) -> None:
    run = tmp_path / "demo"
    shutil.copytree(SEEDS[0], run)
    table = tomllib.loads((run / "config.toml").read_text())
    judge = {
        "kind": "judge",
        "url": "http://10.0.0.7:8000/v1",
        "model": "big",
        "api_key_variable": "OUR_KEY",
        "weight": 0.5,
    }
    function = {"kind": "function", "function": "/home/me/secret/reward.py:score", "params": {"at": "https://me.org/x"}}
    table["reward"] |= {"terms": [judge, function], "sandbox": {"mode": "off"}}
    table["environment"] = {
        "source": {"kind": "openenv", "url": "http://10.0.0.8", "action": "message"},
        "max_turns": 3,
    }
    table["data"]["sources"] = [{"kind": "jsonl", "path": "../private/sums.jsonl", "image_root": "/data"}]
    table["data"]["system_prompt"] = "Read https://spmdrl.org/rules and 1/2."
    (run / "config.toml").write_text(tomlkit.dumps(table))
    card = model_card(run, step=60)
    for hidden in ("10.0.0", "OUR_KEY", "/home", "secret", "me.org", "private", "/data", "sandbox", "runs/"):
        assert hidden not in card, hidden
    for said in (
        "reward.py:score",
        '"model": "big"',
        "sums.jsonl",
        "max_turns = 3",
        "https://spmdrl.org/rules and 1/2",
        "demo-sft/hf",
        "Left out: addresses",
    ):
        assert said in card, said


def test_a_push_needs_a_name_and_a_token(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(["runs/none", "--push", "a/b"]) == 2
    assert "--push a/b needs a token: set HF_TOKEN, or log in" in capsys.readouterr().err
    with pytest.raises(UserError, match="a repository is ORGANISATION/NAME"):
        require_writable("hf:a/b@main")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids it"):
        require_writable("a/b")


def test_a_folder_is_sent_to_a_private_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Api:
        def create_repo(self, name: str, **options: Any) -> str:
            sent.append((name, options))
            return f"https://hub/{name}"

        def upload_folder(self, **options: Any) -> None:
            if options["repo_id"] == "a/full":
                raise OSError("no room")
            sent.append(options)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert send(tmp_path, "a/b", private=True) == "https://hub/a/b"
    assert sent[0] == ("a/b", {"private": True, "exist_ok": True}) and sent[1]["folder_path"] == tmp_path
    with pytest.raises(UserError, match="--push a/full: no room; the model itself is in"):
        send(tmp_path, "a/full", private=True)
