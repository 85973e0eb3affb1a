"""A run small enough to be repeated in every test: its configuration, its start, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any
from unittest import mock

import tomlkit
import torch
from safetensors.torch import load_file

from spmdrl.report import Report
from spmdrl.tools.tiny_model import character_tokenizer, save_tiny_model
from spmdrl.train import main
from tests.helpers.ranks import run_ranks

CONFIG = """\
[run]
name = "run"
num_steps = 4
seed = 3
deterministic = true
threads_per_rank = 1
[data]
max_prompt_tokens = 24
[[data.sources]]
kind = "reasoning_gym"
task = "chain_sum"
params = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
prompt_template = "{metadata[expression]} ="
[rollout]
prompts_per_step = 8
group_size = 4
max_response_tokens = 6
[loss]
updates_per_step = 2
kl_coef = 0.01
[optim]
lr = 1e-2
[pack]
max_tokens_per_micro_batch = 256
[eval]
num_prompts = 10
every = 2
[[eval.sources]]
kind = "reasoning_gym"
task = "chain_sum"
params = { min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1 }
prompt_template = "{metadata[expression]} ="
[checkpoint]
every = 2
[debug]
assert_on_policy = true
"""
ONLY_IN_RL = ("rollout", "reward", "loss", "eval", "debug")

# A reward that a random model can climb at once, so that advantages are not all zero.
REWARD = """\
def digits(*, prompt, response, answer, metadata):
    return sum(character.isdigit() for character in response) / 6
"""


def write_config(folder: Path, *, name: str = "c.toml", **tables: Any) -> Path:
    """Write the configuration of a small run of the model in `folder`, and its reward; return the file.

    Each table replaces or adds keys of the one of its name; None leaves a table or a key out.
    """
    (folder / "reward.py").write_text(REWARD)
    terms = [{"kind": "function", "function": f"{folder}/reward.py:digits"}, {"kind": "exact", "weight": 0.1}]
    settings: dict[str, Any] = tomllib.loads(CONFIG) | {
        "model": {"path": f"{folder}/model"},
        "reward": {"terms": terms},
    }
    settings["run"]["dir"] = f"{folder}/runs"
    for key, table in tables.items():
        settings[key] = settings.get(key, {}) | table if isinstance(table, dict) else table
    written = {key: _given(table) if isinstance(table, dict) else table for key, table in _given(settings).items()}
    # Keys outside of tables come first in TOML.
    ordered = sorted(written.items(), key=lambda item: isinstance(item[1], dict))
    (folder / name).write_text(tomlkit.dumps(dict(ordered)))
    return folder / name


def _given(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def write_sft_config(folder: Path, *, name: str = "c.toml", **tables: Any) -> Path:
    """Write the configuration of a small fine-tuning run of the model in `folder`; see `write_config`."""
    return write_config(folder, name=name, **(dict.fromkeys(ONLY_IN_RL) | tables))


def write_small_run(folder: Path, *, model: dict[str, Any], **tables: Any) -> Path:
    """Write a tiny model of these sizes and the configuration of a run of it."""
    save_tiny_model(folder / "model", **model)
    return write_config(folder, **tables)


def sums_from_files(folder: Path) -> dict[str, Any]:
    """Write the sums of two digits into files; return the tables of a run that reads them, and needs no reasoning-gym.

    Every tenth of the hundred is held out.
    """
    sums = [{"prompt": f"{a} + {b} =", "answer": f"{a + b}"} for a in range(10) for b in range(10)]
    held_out = sums[::10]
    tables: dict[str, Any] = {}
    for table, records in (("data", [record for record in sums if record not in held_out]), ("eval", held_out)):
        path = folder / f"{table}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        tables[table] = {"sources": [{"kind": "jsonl", "path": f"{path}"}]}
    return tables


def model_and_sums(save: Callable[..., Any], folder: Path, **sizes: Any) -> dict[str, Any]:
    """Write a model of another family with a tokenizer, and sums; return the tables of a run that reads them."""
    tokenizer = character_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    save(folder / "model", vocab_size=len(tokenizer), **ids, **sizes)
    tokenizer.save_pretrained(folder / "model")
    return sums_from_files(folder)


def torchrun_command(num_ranks: int, *arguments: str, max_restarts: int = 0) -> list[str]:
    """The command line that trains on this machine by torchrun."""
    elastic = ["torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher = [sys.executable, "-m", *elastic, "--nproc-per-node", str(num_ranks)]
    return [*launcher, "--max-restarts", str(max_restarts), "-m", "spmdrl.train", *arguments]


def start_torchrun(num_ranks: int, *arguments: str, max_restarts: int = 0, **streams: Any) -> subprocess.Popen[str]:
    """Start a run by torchrun, and return while it goes on."""
    command = torchrun_command(num_ranks, *arguments, max_restarts=max_restarts)
    return subprocess.Popen(command, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams)


def finished_torchrun(num_ranks: int, *arguments: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run to the end by torchrun, however it ends.

    What it writes lies in files meanwhile, which tests/gpu/proof/run.py shows of a step that it has to kill.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    command = torchrun_command(num_ranks, *arguments)
    with _stream("out") as out, _stream("err") as err:
        done = subprocess.run(command, stdout=out, stderr=err, timeout=timeout_s, env=environment)
        return subprocess.CompletedProcess(command, done.returncode, *(_text(stream) for stream in (out, err)))


def _stream(name: str) -> IO[bytes]:
    return NamedTemporaryFile(prefix="torchrun-", suffix=f".{name}")


def _text(stream: IO[bytes]) -> str:
    return Path(stream.name).read_text(encoding="utf-8")


def torchrun(folder: Path, num_ranks: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run the configuration in `folder` to the end by torchrun, and require that it ends well."""
    done = finished_torchrun(num_ranks, str(folder / "c.toml"), *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def launch(folder: Path, num_ranks: int, *overrides: str) -> None:
    """Run the configuration in `folder` to the end on ranks that are forked, which saves the seconds of torchrun and of
    their imports."""
    codes = run_ranks(num_ranks, without_curves, main, [str(folder / "c.toml"), *overrides], timeout_s=600.0)
    assert set(codes) == {0}


def without_curves(program: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run one rank's program without the second that its plots take at the end."""
    with mock.patch.object(Report, "_write_curves", lambda *_: "no curves"):
        return program(argv)


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steady_rows(run: Path) -> list[dict[str, Any]]:
    """The metrics that are not about time or memory, and so repeat."""
    aside = ("time", "speed", "memory", "checkpoint")
    return [{name: value for name, value in row.items() if name.split("/")[0] not in aside} for row in rows(run)]


def sample_rows(run: Path) -> list[dict[str, Any]]:
    """The rollouts that the run wrote."""
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights that the run has exported."""
    return load_file(run / "hf/model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    """Compare the exports of two runs bit for bit."""
    expected, found = weights(one), weights(other)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
