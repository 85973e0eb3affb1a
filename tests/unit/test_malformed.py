"""The table of malformed inputs: each ends with one sentence and exit code 2 before anything is touched, or, where a
reward function misbehaves in the middle of a run, is counted and survived."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from spmdrl.algo.metrics import Total
from spmdrl.checkpoint.manifest import MANIFEST
from spmdrl.config import FunctionReward, RewardConfig, SandboxConfig
from spmdrl.data import tokenizer
from spmdrl.faults.files import FaultFiles
from spmdrl.faults.verdict import read_error
from spmdrl.report.files import read_rows
from spmdrl.rewards.client import RewardPool
from spmdrl.step.rewards import failure_lines, rollout_metrics
from spmdrl.tools.export import main as export
from spmdrl.tools.replay import main as replay
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.train import main
from spmdrl.types import Prompt, Response, RewardedRollout, Span
from tests.helpers.pools import outcomes_of
from tests.helpers.rewards import item, running, wait_for
from tests.helpers.rollouts import one_turn
from tests.helpers.small_run import without_curves

CONFIG = """\
[run]
name = "run"
dir = "{folder}/runs"
num_steps = 1
[model]
path = "{folder}/model"
[data]
max_prompt_tokens = 24
sources = [{{ kind = "jsonl", path = "{folder}/rows.jsonl" }}]
[rollout]
prompts_per_step = 2
group_size = 2
max_response_tokens = 6
[reward]
terms = [{{ kind = "exact" }}]
[optim]
lr = 1e-2
[pack]
max_tokens_per_micro_batch = 64
"""
GOOD_ROW = '{"prompt": "1 + 1 =", "answer": "2"}\n'
Change = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """A folder that was good, what is done to it, and what must be said."""

    change: Change
    sentence: str
    overrides: tuple[str, ...] = ()
    dry_run: bool = True


def written(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def removed(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names]


def replaced(old: str, new: str) -> Change:
    """In the configuration."""

    def change(folder: Path) -> None:
        text = (folder / "c.toml").read_text()
        assert old in text
        (folder / "c.toml").write_text(text.replace(old, new))

    return change


def as_bytes(change: Callable[[bytes], bytes], name: str = "c.toml") -> Change:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def instead_of_file(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def pipe_instead_of_file(name: str) -> Change:
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


def nothing(folder: Path) -> None:
    pass


TOML = {
    "syntax": Case(replaced("num_steps = 1", "num_steps = "), "c.toml is not valid TOML: Invalid value (at line 4"),
    "a table twice": Case(replaced("[optim]", "[run]"), "Cannot declare ('run',) twice (at line 16"),
    "a key twice": Case(replaced("lr = 1e-2", "lr = 1e-2\nlr = 1.0"), "Cannot overwrite a value (at line 18"),
    "nested without end": Case(written("c.toml", "x = " + "[" * 9999), "nested too deeply"),
    "a byte order mark": Case(as_bytes(lambda text: b"\xef\xbb\xbf" + text), "begins with a byte order mark"),
    "Latin-1": Case(as_bytes(lambda text: text + b"# \xe9"), "it is not UTF-8 text"),
    "UTF-16": Case(as_bytes(lambda text: text.decode().encode("utf-16")), "it is not UTF-8 text"),
    "NUL": Case(as_bytes(lambda text: text + b"\0"), "is not valid TOML: Invalid statement (at line 20"),
    "empty": Case(written("c.toml", ""), "c.toml: optim: required, not set"),
    "absent": Case(removed("c.toml"), "c.toml: No such file or directory"),
    "a directory": Case(instead_of_file("c.toml"), "c.toml: Is a directory"),
    "an unknown key": Case(replaced("lr = 1e-2", "lrr = 1e-2"), "c.toml:17: optim.lrr: no such setting; did you mean"),
    "an unknown table": Case(replaced("[pack]", "[packs]"), "packs: no such setting; did you mean pack?"),
    "a value for a table": Case(replaced("[optim]\nlr = 1e-2", ""), "optim = 3: must be a table", ("optim=3",)),
    "an array for a table": Case(replaced("[optim]", "[[optim]]"), "must be a table of settings"),
    "text for a number": Case(replaced("lr = 1e-2", 'lr = "1e-2"'), 'c.toml:17: optim.lr = "1e-2": input should be'),
    "a date for a number": Case(replaced("lr = 1e-2", "lr = 2026-11-21"), "optim.lr = 2026-11-21: input should be"),
    "a fraction for a count": Case(replaced("num_steps = 1", "num_steps = 1.5"), "c.toml:4: run.num_steps = 1.5"),
    "a truth for a count": Case(replaced("num_steps = 1", "num_steps = true"), "run.num_steps = true: input should be"),
    "not a number": Case(replaced("lr = 1e-2", "lr = nan"), "optim.lr = nan: input should be a finite number"),
    "infinity": Case(replaced("lr = 1e-2", "lr = inf"), "optim.lr = inf: input should be a finite number"),
    "negative": Case(replaced("lr = 1e-2", "lr = -1.0"), "optim.lr = -1.0: input should be greater than 0"),
    "no steps": Case(replaced("num_steps = 1", "num_steps = 0"), "run.num_steps = 0: input should be greater"),
    "more than 64 bits": Case(replaced("num_steps = 1", f"num_steps = {2**63}"), "c.toml:4: run.num_steps: whole numb"),
    "NUL in a path": Case(replaced('dir = "', 'dir = "\\u0000'), "c.toml:3: run.dir: text must not hold the character"),
    "an empty list": Case(replaced('[{ kind = "exact" }]', "[]"), "c.toml:15: reward.terms is empty"),
    "an unknown kind": Case(replaced('"exact"', '"exactly"'), 'reward.terms.0.kind: must be one of "exact", "math"'),
    "nothing to win": Case(replaced('"exact"', '"exact", weight = -1.0'), "no term has a positive weight"),
    "a contradiction": Case(
        nothing, "max_draw_ratio has no meaning without dynamic_sampling", ("rollout.max_draw_ratio=2.0",)
    ),
    "code outside a sandbox": Case(
        replaced('"exact"', '"code"'), "reward: the term of kind", ('reward.sandbox.mode="off"',)
    ),
    "tests longer than the reward": Case(
        replaced('"exact"', '"code"'), "tests_timeout_s = 5 must be below timeout_s = 5", ("reward.timeout_s=5.0",)
    ),
    "an override of no form": Case(nothing, "'optim.lr' on the command line is not of the form", ("optim.lr",)),
    "an override below a value": Case(nothing, "lr is a value, not a table of settings", ("optim.lr.x=1",)),
    "a deep override": Case(nothing, "data.sources on the command line is nested", ("data.sources=" + "[" * 9999,)),
    "a file for the runs": Case(replaced("/runs", "/c.toml"), "cannot be created (Not a directory)"),
    "runs where nothing can be written": Case(
        nothing, "the run folder /proc/1/x/run cannot be", ("run.dir=/proc/1/x",)
    ),
    "5,000 digits": Case(replaced("num_steps = 1", "num_steps = " + "9" * 5000), "c.toml is not valid TOML: Exceeds"),
    "5,000 digits in base 16": Case(
        replaced("num_steps = 1", "num_steps = 0x" + "f" * 5000), "c.toml:4: run.num_steps: whole numbers have 64 bits"
    ),
    "a seed below 0": Case(nothing, "run.seed = -1: input should be greater than or equal to 0", ("run.seed=-1",)),
    "no name of a folder": Case(nothing, 'run.dir = "" is empty; "." is the working', ("run.dir=",)),
    "a temperature beyond all logits": Case(
        nothing, "rollout.temperature = 1e+300: input", ("rollout.temperature=1e300",)
    ),
    "a temperature of nearly 0": Case(nothing, "rollout.temperature = 1e-07: input", ("rollout.temperature=1e-7",)),
    "an evaluation that is nearly greedy": Case(
        nothing, "eval.temperature = 1e-07 is so low that", ("eval.num_prompts=1", "eval.temperature=1e-7")
    ),
    "a rate beyond float32": Case(nothing, "optim.lr = 1e+300: input should be less", ("optim.lr=1e300",)),
    "weights whose sum is infinite": Case(
        replaced('"exact"', '"exact", weight = 1e308'), "reward.terms.0.weight = 1e+308: input should be less"
    ),
    "shares whose sum is infinite": Case(
        replaced('kind = "jsonl"', 'kind = "jsonl", weight = 1e308'),
        "data.sources.0.weight = 1e+308: input should be less",
    ),
    "a task of two lines": Case(
        replaced('kind = "jsonl"', 'kind = "jsonl", task = "a\\nb"'), 'task = "a\\nb" is a name in tables and charts'
    ),
    "5,000 digits in an override": Case(nothing, "run.num_steps = ", ("run.num_steps=" + "9" * 5000,)),
    "a count beyond what is counted": Case(
        nothing, "input should be less than or equal to", (f"rollout.group_size={2**40}",)
    ),
    "more time than clocks have": Case(
        nothing, "reward.timeout_s = 1e+300: input should be", ("reward.timeout_s=1e300",)
    ),
    "less time than clocks have": Case(
        nothing, "reward.timeout_s = 1e-09: input should be", ("reward.timeout_s=1e-9",)
    ),
    "more memory than there is": Case(
        nothing, "max_memory_gib = 1e+30: input", ("reward.sandbox.max_memory_gib=1e30",)
    ),
    "patience of 10^15 minutes": Case(nothing, "run.patience_minutes = 1000", (f"run.patience_minutes={10**15}",)),
    "an end in the year 1": Case(nothing, "is in the past", ("run.stop_before=0001-01-01T00:00:00",)),
    "a home": Case(nothing, 'run.dir = "~/runs" begins with "~", which only a shell', ("run.dir=~/runs",)),
    "a name of 300 characters": Case(nothing, "string should have at most 200 characters", ("run.name=" + "x" * 300,)),
    "a path of 5,000 characters": Case(nothing, "is longer than any path", ("model.path=" + "x" * 5000,)),
    "bytes that are not UTF-8": Case(nothing, "run.dir is not valid Unicode", ("run.dir=a\udcff",)),
    "two settings in an override": Case(
        nothing, "optim.lr on the command line is followed by other settings", ("optim.lr=1.0\n[run]\nseed=3",)
    ),
    "a pipe": Case(pipe_instead_of_file("c.toml"), "it is a pipe or a device"),
    "a width without end": Case(
        replaced(
            'kind = "jsonl"', 'kind = "reasoning_gym", task = "chain_sum", prompt_template = "{question:>99999999999}"'
        ),
        "pads a field to more than 9999 characters",
    ),
}


def inside_run(put: Callable[[Path], object]) -> Change:
    """Something in the folder of the run, before there is one."""
    return lambda folder: ((folder / "runs/run").mkdir(parents=True), put(folder / "runs/run"))


FOLDERS = {
    "a link for a file": Case(
        inside_run(lambda run: (run / "metrics.jsonl").symlink_to("/etc/hostname")),
        "metrics.jsonl is a link, and the run",
    ),
    "a directory for a file": Case(
        inside_run(lambda run: (run / "config.toml").mkdir()), "config.toml is no ordinary file"
    ),
    "a file for the run's folder": Case(
        lambda folder: ((folder / "runs").mkdir(), (folder / "runs/run").touch()),
        "runs/run is a file; move it away, or set run.name",
    ),
    "a line that is not JSON": Case(
        inside_run(lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2\n{"step": 3}\n')),
        "metrics.jsonl: line 2 is not valid JSON",
    ),
    "text for a number": Case(
        inside_run(lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "loss": "low"}\n')),
        "metrics.jsonl is of another form: 0.loss",
    ),
    "rows out of order": Case(
        inside_run(lambda run: (run / "samples.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 1}\n')),
        "samples.jsonl: line 3 is of step 1, after one of step 2; remove that line",
    ),
    "two rows of a step": Case(
        inside_run(lambda run: (run / "metrics.jsonl").write_text('{"step": 1}\n{"step": 1}\n')),
        "metrics.jsonl has two rows of step 1; mend the file, or move it away",
    ),
    "a machine that is cut off": Case(
        inside_run(lambda run: (run / "machine.json").write_text('{"linear_kernels"')),
        "machine.json is not valid JSON",
    ),
    "rows of a run whose checkpoints are gone": Case(
        inside_run(lambda run: (run / "metrics.jsonl").write_text('{"step": 3, "checkpoint/write_s": 0.1}\n')),
        "a checkpoint was written by step 3, but",
    ),
    "a sample that is not JSON": Case(
        inside_run(lambda run: (run / "samples.jsonl").write_bytes(b'{"step": 1}\r\n\0\0\n')),
        "samples.jsonl: line 2 is not valid JSON",
    ),
    "a pipe for a launch": Case(
        inside_run(lambda run: ((run / "launches").mkdir(), os.mkfifo(run / "launches/1.json"))),
        "launches/1.json is no ordinary file",
    ),
    "a pipe for a log": Case(
        inside_run(lambda run: ((run / "logs").mkdir(), os.mkfifo(run / "logs/rank-0.log"))),
        "logs/rank-0.log is no ordinary file",
    ),
    "a directory for a file of the user's": Case(
        inside_run(lambda run: (run / "stop").mkdir()), "stop is a directory, and a file there stops the run; remove it"
    ),
    "a loop of links for the runs": Case(
        lambda folder: (folder / "runs").symlink_to("runs"), "cannot be created (Too many levels of symbolic links)"
    ),
    "a loop of links for the run": Case(
        lambda folder: ((folder / "runs").mkdir(), (folder / "runs/run").symlink_to("run")),
        "cannot be created (Too many levels of symbolic links)",
    ),
    "a link to nothing for a directory": Case(
        inside_run(lambda run: (run / "launches").symlink_to("nowhere")), "launches is no directory, and the run"
    ),
    "a file for a directory": Case(inside_run(lambda run: (run / "logs").touch()), "logs is no directory, and the run"),
}


def row(text: str) -> Change:
    """A bad row after a good one."""
    return written("rows.jsonl", GOOD_ROW + text)


def parquet(**columns: Any) -> Change:
    def change(folder: Path) -> None:
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
        replaced('"jsonl"', '"parquet"')(folder)
        replaced("rows.jsonl", "rows.parquet")(folder)

    return change


NOT_TEXT = pyarrow.Array.from_buffers(
    pyarrow.string(), 1, [None, pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")]
)


def template(text: str) -> Change:
    source = f'kind = "reasoning_gym", task = "chain_sum", prompt_template = "{text}"'
    return lambda folder: replaced(f'kind = "jsonl", path = "{folder}/rows.jsonl"', source)(folder)


DATA = {
    "absent": Case(removed("rows.jsonl"), "rows.jsonl: No such file or directory"),
    "a directory": Case(instead_of_file("rows.jsonl"), "rows.jsonl: Is a directory"),
    "empty": Case(written("rows.jsonl", ""), "rows.jsonl has no rows"),
    "blank lines only": Case(written("rows.jsonl", "\n\n"), "rows.jsonl has no rows"),
    "half a row": Case(row('{"prompt": "a"\n'), "rows.jsonl line 2 is not valid JSON: Expecting ',' delimiter"),
    "not UTF-8": Case(written("rows.jsonl", GOOD_ROW.encode() + b'{"prompt": "\xc3"}'), "line 2 is not valid JSON"),
    "NUL": Case(row("\0\n"), "rows.jsonl line 2 is not valid JSON"),
    "half a character": Case(
        row('{"prompt": "\\ud800", "answer": "1"}'), "line 2 is not valid JSON: 'utf-8' codec can't"
    ),
    "nested without end": Case(
        row('{"prompt": ' + "[" * 99999), "rows.jsonl line 2 is not valid JSON: it has more than"
    ),
    "a key twice": Case(row('{"prompt": "a", "prompt": "b", "answer": "1"}'), 'has the key "prompt" twice'),
    "a pipe": Case(pipe_instead_of_file("rows.jsonl"), "it is a pipe or a device"),
    "nested 200 deep": Case(
        row('{"prompt": "a", "answer": "1", "x": ' + "[" * 200 + "]" * 200 + "}"), "it has more than 100"
    ),
    "parquet on a network": Case(
        lambda folder: (
            replaced('"jsonl"', '"parquet"')(folder),
            replaced(f"{folder}/rows.jsonl", "s3://bucket/rows.parquet")(folder),
        ),
        "cannot read s3://bucket/rows.parquet: No such file or directory",
    ),
    "parquet of text that is none": Case(
        parquet(prompt=["a"], answer=NOT_TEXT), "row 1 of 1 holds a value that cannot be read"
    ),
    "parquet of a time zone that nobody knows": Case(
        parquet(prompt=["a"], answer=["1"], at=pyarrow.array([1], pyarrow.timestamp("us", tz="Mars/Base"))),
        "row 1 of 1 holds a value that cannot be read",
    ),
    "parquet of a year beyond years": Case(
        parquet(prompt=["a"], answer=["1"], day=pyarrow.array([2**31 - 1], pyarrow.date32())),
        "row 1 of 1 holds a value that cannot be read",
    ),
    "messages and a system prompt": Case(
        row('{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}'), "the tokenizer has no chat template"
    ),
    "a list for a row": Case(row('["a", "b"]'), "rows.jsonl line 2 is not a JSON object but list"),
    "no prompt": Case(
        row('{"promt": "a", "answer": "1"}'), 'has no column "prompt" (prompt_column); it has promt, ans'
    ),
    "no answer": Case(row('{"prompt": "a"}'), 'line 2 has no column "answer" (answer_column)'),
    "null for a prompt": Case(row('{"prompt": null, "answer": "1"}'), "but it is NoneType: None"),
    "an empty prompt": Case(row('{"prompt": "", "answer": "1"}'), "but it is empty"),
    "a prompt of white space": Case(
        row('{"prompt": " \\n", "answer": "1"}'), 'line 2: "prompt" is empty or white space'
    ),
    "messages of white space": Case(
        row('{"prompt": [{"role": "user", "content": " "}], "answer": "1"}'), 'line 2: "prompt" is empty or white space'
    ),
    "NUL in a prompt": Case(row('{"prompt": "a\\u0000", "answer": "1"}'), "line 2 holds the character NUL"),
    "NUL in an answer": Case(row('{"prompt": "a", "answer": "\\u0000"}'), "line 2 holds the character NUL"),
    "a number for a prompt": Case(row('{"prompt": 3, "answer": "1"}'), "but it is int: 3"),
    "text for messages": Case(row('{"prompt": ["a"], "answer": "1"}'), "but it is list: ['a']"),
    "messages without a template": Case(
        row('{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}'), "the tokenizer has no chat template"
    ),
    "null for an answer": Case(row('{"prompt": "a", "answer": null}'), "a string or a whole number, not NoneType"),
    "a fraction for an answer": Case(row('{"prompt": "a", "answer": 0.5}'), "a string or a whole number, not float"),
    "too long": Case(
        row(json.dumps({"prompt": "1" * 99, "answer": "1"})), "line 2: the prompt has 99 tokens, more than"
    ),
    "all too long": Case(
        written("rows.jsonl", json.dumps({"prompt": "1" * 99, "answer": "1"})),
        "has 1 rows, and every one of them is held out or too long",
        ("data.overlong=drop",),
    ),
    "text for parquet": Case(replaced('"jsonl"', '"parquet"'), "rows.jsonl is not a parquet file"),
    "parquet without the column": Case(parquet(question=["a"], answer=["1"]), 'row 1 of 1 has no column "prompt"'),
    "parquet with a null": Case(parquet(prompt=["a", None], answer=["1", "2"]), "rows.parquet row 2"),
    "parquet of bytes": Case(parquet(prompt=[b"a"], answer=["1"]), "but it is bytes: b'a'"),
    "parquet without rows": Case(parquet(prompt=[], answer=[]), "rows.parquet has no rows"),
    "parquet cut off": Case(
        lambda folder: (
            parquet(prompt=["a"], answer=["1"])(folder),
            as_bytes(lambda b: b[:99], "rows.parquet")(folder),
        ),
        "rows.parquet is not a parquet file",
    ),
    "a template of unknown keys": Case(template("{metadata[absent]}"), "does not fit chain_sum: KeyError: 'absent'"),
    "a template without an end": Case(template("{question"), "does not fit chain_sum: ValueError"),
    "an empty template": Case(template(""), "chain_sum item 0: the prompt is empty"),
}


def json_with(name: str, **changes: Any) -> Change:
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))


def without_key(name: str, key: str) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        del content[key]
        (folder / name).write_text(json.dumps(content))

    return change


WEIGHTS, SOME_WEIGHT = "model/model.safetensors", "model.layers.0.self_attn.q_proj.weight"


def tensors(change: Callable[[dict[str, Any]], object]) -> Change:
    def change_file(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return change_file


def without_what_its_index_names(folder: Path) -> None:
    held = load_file(folder / WEIGHTS)
    written(f"{WEIGHTS}.index.json", json.dumps({"weight_map": dict.fromkeys(held, "a.safetensors")}))(folder)
    del held[SOME_WEIGHT]
    save_file(held, folder / "model/a.safetensors", metadata={"format": "pt"})
    (folder / WEIGHTS).unlink()


MODEL = {
    "absent": Case(lambda folder: shutil.rmtree(folder / "model"), "does not exist; set it to a directory"),
    "a file": Case(replaced("/model", "/rows.jsonl"), "is not a model directory: it has no config.json"),
    "a name on a hub": Case(
        nothing,
        'does not exist; set it to a directory, or to "hf:Qwen/Qwen3-0.6B", from the hub',
        ("model.path=Qwen/Qwen3-0.6B",),
    ),
    "no config": Case(removed("model/config.json"), "is not a model directory: it has no config.json"),
    "a config that is not JSON": Case(written("model/config.json", "{"), "config.json is not valid JSON"),
    "a list for a config": Case(
        written("model/config.json", "[]"), "config.json is of another form: input should be a valid dictionary"
    ),
    "a kind that is unknown": Case(json_with("model/config.json", model_type="none"), "does not recognize this archit"),
    "a kind that reads both ways": Case(json_with("model/config.json", model_type="bert"), "bidirectional attention"),
    "code of its own": Case(
        json_with(
            "model/config.json", model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
        ),
        "custom code",
    ),
    "no layers": Case(json_with("model/config.json", num_hidden_layers=-1), "is not a causal language model"),
    "no weights": Case(removed(WEIGHTS), "holds no *.safetensors weights"),
    "pickled weights only": Case(
        lambda folder: (folder / WEIGHTS).rename(folder / "model/pytorch_model.bin"), "holds no *.safetensors weights"
    ),
    "empty weights": Case(written(WEIGHTS, b""), "its weights cannot be read: model.safetensors"),
    "weights cut off": Case(
        as_bytes(lambda held: held[: len(held) // 2], WEIGHTS), "its weights cannot be read: model.safetensors"
    ),
    "no safetensors file": Case(written(WEIGHTS, b"\xff" * 999), "its weights cannot be read: model.safetensors"),
    "an index that is not JSON": Case(written(f"{WEIGHTS}.index.json", "{"), "is not an index of weights"),
    "an index without a map": Case(written(f"{WEIGHTS}.index.json", "{}"), "is not an index of weights"),
    "an index of absent files": Case(
        written(f"{WEIGHTS}.index.json", json.dumps({"weight_map": {"a": "model-2.safetensors"}})),
        "names 1 files, and 1 of them are missing; the first is model-2.safetensors",
    ),
    "an index of a pickle": Case(
        written(f"{WEIGHTS}.index.json", json.dumps({"weight_map": {"a": "pytorch_model.bin"}})),
        'names "pytorch_model.bin"; weights are read from *.safetensors files of the directory alone',
    ),
    "an index of files elsewhere": Case(
        written(f"{WEIGHTS}.index.json", json.dumps({"weight_map": {"a": "../x.safetensors"}})),
        'names "../x.safetensors"; weights are read',
    ),
    "weights of whole numbers": Case(
        tensors(lambda held: held.update({SOME_WEIGHT: held[SOME_WEIGHT].to(torch.int8)})),
        f"1 of its weights are no floating-point numbers that can be trained; the first is {SOME_WEIGHT}, of I8",
    ),
    "complex weights": Case(
        tensors(lambda held: held.update({SOME_WEIGHT: held[SOME_WEIGHT].to(torch.complex64)})),
        "of C64; save the model",
    ),
    "a missing tensor": Case(
        tensors(lambda held: held.pop(SOME_WEIGHT)),
        f"lacks 1 of the weights that its config.json requires; the first is {SOME_WEIGHT}",
    ),
    "a missing tensor of an index": Case(
        without_what_its_index_names, f"1 of them are missing; the first is {SOME_WEIGHT}, of a.safetensors"
    ),
    "a tensor of another shape": Case(
        tensors(lambda held: held.update({SOME_WEIGHT: held[SOME_WEIGHT][:3].contiguous()})),
        f"the first is {SOME_WEIGHT}: [3, 32] instead of [32, 32]",
    ),
    "a tensor in two files": Case(
        lambda folder: shutil.copy(folder / WEIGHTS, folder / "model/other.safetensors"),
        "is in model.safetensors and in other.safetensors, and only one of them is read",
    ),
    "no hidden size": Case(json_with("model/config.json", hidden_size=0), "[99, 32] instead of [99, 0]"),
    "a vocabulary of 10^12": Case(
        json_with("model/config.json", vocab_size=10**12), "[99, 32] instead of [1000000000000, 32]"
    ),
    "text for a greatest length": Case(
        json_with("model/tokenizer_config.json", model_max_length="x"),
        "model_max_length of its tokenizer_config.json is no",
    ),
    "no tokenizer": Case(removed("model/tokenizer.json", "model/tokenizer_config.json"), "has no tokenizer"),
    "a tokenizer that is not JSON": Case(written("model/tokenizer.json", "{"), "its tokenizer cannot be loaded"),
    "a list for a tokenizer": Case(written("model/tokenizer_config.json", "[1]"), "its tokenizer cannot be loaded"),
    "a tokenizer with a pattern without end": Case(
        lambda folder: (
            json_with(
                "model/tokenizer.json",
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "(a+)+$"},
                    "behavior": "Isolated",
                    "invert": False,
                },
            )(folder),
            written("rows.jsonl", json.dumps({"prompt": "a" * 28 + "b", "answer": "1"}))(folder),
        ),
        "line 1: the tokenizer cannot encode a text of 29 characters: Onig",
        ("data.max_prompt_tokens=40",),
    ),
    "a tokenizer of a larger model": Case(json_with("model/config.json", vocab_size=50), "belongs to another model"),
    "no end of sequence": Case(
        lambda folder: (
            without_key("model/tokenizer_config.json", "eos_token")(folder),
            removed("model/generation_config.json")(folder),
        ),
        "names an end-of-sequence token; set rollout.stop_token_ids",
    ),
    "a generation config that is not JSON": Case(
        written("model/generation_config.json", "{"), "config.json is not valid JSON"
    ),
    "an end that is no token": Case(
        written("model/generation_config.json", '{"eos_token_id": 99999}'),
        "with the token 99999, but the tokenizer has",
    ),
    "an end below all tokens": Case(
        written("model/generation_config.json", '{"eos_token_id": [-1]}'), "with the token -1"
    ),
    "ends in a table": Case(written("model/generation_config.json", '{"eos_token_id": {"a": 1}}'), "eos_token_id"),
    "a directory for a generation config": Case(
        instead_of_file("model/generation_config.json"), "generation_config.json: Is a directory"
    ),
    **{
        f"a chat template that {does}": Case(
            written("model/chat_template.jinja", text), f"the tokenizer's chat template refuses the prompt: {says}"
        )
        for does, text, says in (
            ("divides by zero", "{{ 1 / 0 }}", "division by zero"),
            ("raises", "{{ raise_exception('not so') }}", "not so"),
            ("reaches for Python", "{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str'"),
            ("reads a file", "{% include '/etc/passwd' %}", "no loader for this environment"),
            (
                "calls itself",
                "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
                "",
            ),  # too deep, or for too long on a busy machine
            ("wants more memory than there is", "{{ 'x' * 10 ** 15 }}", "MemoryError"),
            ("says half a character", "{{ '\\ud800' }}", "its text is not valid Unicode"),
            (
                "never ends",
                "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
                "it has not ended after 0.5 s",
            ),
        )
    },
    "text for an end of sequence": Case(
        written("model/generation_config.json", '{"eos_token_id": "x"}'),
        "is of another form: eos_token_id",
    ),
}

CHECKPOINTS_OF_RUN = "runs/run/checkpoints"
OLDER, NEWEST = (f"{CHECKPOINTS_OF_RUN}/step-0000000{step}" for step in (1, 2))


def manifest(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the newest checkpoint's manifest, so that it agrees with itself."""

    def change_file(folder: Path) -> None:
        path = folder / NEWEST / MANIFEST
        content = json.loads(path.read_text())
        del content["sha256"]
        change(content)
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(content))

    return change_file


def another_kind(checkpoint: str, put: Callable[[Path], object]) -> Change:
    """Something else under the name of a checkpoint."""
    return lambda folder: (shutil.rmtree(folder / checkpoint), put(folder / checkpoint))


def flipped(name: str) -> Change:
    return as_bytes(
        lambda held: held[: len(held) // 2] + bytes([held[len(held) // 2] ^ 4]) + held[len(held) // 2 + 1 :], name
    )


TENSORS = "__0_0.distcp"
NOT_WRITTEN = "manifest.json is truncated or was changed after it was written"
NO_MANIFEST = "manifest.json is missing"
# What is done to the newest of two checkpoints, and what is said to be wrong with it.
DAMAGES: dict[str, tuple[Change, str]] = {
    "tensors cut off": (
        as_bytes(lambda held: held[:100], f"{NEWEST}/{TENSORS}"),
        "__0_0.distcp is truncated: it has N of N bytes",
    ),
    "no bytes of tensors": (written(f"{NEWEST}/{TENSORS}", ""), "__0_0.distcp is truncated: it has N of N bytes"),
    "more than was written": (
        as_bytes(lambda held: held + b"x", f"{NEWEST}/{TENSORS}"),
        "__0_0.distcp is too long: it has N bytes, but N were written",
    ),
    "a flipped bit of tensors": (
        flipped(f"{NEWEST}/{TENSORS}"),
        "__0_0.distcp was changed after it was written",
    ),
    "a flipped bit of the state": (
        flipped(f"{NEWEST}/state.json"),
        "state.json was changed after it was written",
    ),
    "no tensors": (removed(f"{NEWEST}/{TENSORS}"), "__0_0.distcp is missing"),
    "no table of tensors": (removed(f"{NEWEST}/.metadata"), ".metadata is missing"),
    "no state": (removed(f"{NEWEST}/state.json"), "state.json is missing"),
    "no place in the prompts": (removed(f"{NEWEST}/collector.json"), "collector.json is missing"),
    "two files": (
        removed(f"{NEWEST}/.metadata", f"{NEWEST}/state.json"),
        ".metadata is missing, state.json is missing",
    ),
    "a directory for a file": (
        instead_of_file(f"{NEWEST}/{TENSORS}"),
        "__0_0.distcp cannot be read (Is a directory)",
    ),
    "no manifest": (removed(f"{NEWEST}/{MANIFEST}"), NO_MANIFEST),
    "a directory for a manifest": (
        instead_of_file(f"{NEWEST}/{MANIFEST}"),
        "manifest.json cannot be read (Is a directory)",
    ),
    "an empty manifest": (written(f"{NEWEST}/{MANIFEST}", ""), NOT_WRITTEN),
    "a manifest that is not JSON": (written(f"{NEWEST}/{MANIFEST}", "{"), NOT_WRITTEN),
    "a manifest that is not UTF-8": (written(f"{NEWEST}/{MANIFEST}", b"\xff"), NOT_WRITTEN),
    "a list for a manifest": (written(f"{NEWEST}/{MANIFEST}", "[]"), NOT_WRITTEN),
    "a manifest nested without end": (written(f"{NEWEST}/{MANIFEST}", "[" * 99999), NOT_WRITTEN),
    "a pipe for a manifest": (
        pipe_instead_of_file(f"{NEWEST}/{MANIFEST}"),
        "manifest.json cannot be read (it is a pipe or a device)",
    ),
    "a pipe for a file": (
        pipe_instead_of_file(f"{NEWEST}/{TENSORS}"),
        "__0_0.distcp cannot be read (it is a pipe or a device)",
    ),
    "a manifest cut off": (as_bytes(lambda held: held[:-9], f"{NEWEST}/{MANIFEST}"), NOT_WRITTEN),
    "a manifest that was edited": (
        as_bytes(lambda held: held.replace(b'"step": 2', b'"step": 3'), f"{NEWEST}/{MANIFEST}"),
        "manifest.json was changed after it was written",
    ),
    "a newer format": (
        manifest(lambda content: content.update(format=2)),
        "manifest.json has format 2, but this version of spmdrl reads format 1",
    ),
    "no files": (
        manifest(lambda content: content.update(files={})),
        "manifest.json does not name state.json, which every checkpoint has",
    ),
    "files elsewhere": (
        manifest(lambda content: content["files"].update({"../x": content["files"]["state.json"]})),
        "manifest.json names ../x, which is no file of the checkpoint",
    ),
    "other types": (
        manifest(lambda content: content.update(num_ranks="2")),
        "manifest.json is of another form: num_ranks: input should be a valid integer",
    ),
    "another key": (
        manifest(lambda content: content.update(more=1)),
        "manifest.json is of another form: more: extra inputs are not permitted",
    ),
    "another step's under its name": (
        lambda folder: (shutil.rmtree(folder / NEWEST), shutil.copytree(folder / OLDER, folder / NEWEST)),
        "manifest.json belongs to step 1",
    ),
    "an empty directory": (another_kind(NEWEST, Path.mkdir), NO_MANIFEST),
    "a file for a directory": (another_kind(NEWEST, Path.touch), "manifest.json cannot be read (Not a directory)"),
    "a link that leads nowhere": (
        another_kind(NEWEST, lambda path: path.symlink_to("not-mounted", target_is_directory=True)),
        NO_MANIFEST,
    ),
}
RESUME_FROM_1 = (
    "the newest checkpoint cannot be loaded; restore it, or set resume.allow_older = true to resume from step 1, "
    "which is complete"
)


def no_such(path: str) -> str:
    return (
        f'resume.checkpoint = "{path}" is not a checkpoint; set it to "auto", "never", or a directory such as '
        "runs/NAME/checkpoints/step-00000010"
    )


# What is done to a run of two checkpoints, the settings it is started again with, and all that is said.
RESUMES: dict[str, tuple[Change, tuple[str, ...], list[str]]] = {
    **{name: (change, (), [f"{NEWEST}: {wrong}", RESUME_FROM_1]) for name, (change, wrong) in DAMAGES.items()},
    "none that is whole": (
        lambda folder: [(folder / step / MANIFEST).unlink() for step in (OLDER, NEWEST)],
        ("resume.allow_older=true",),
        [
            f"{NEWEST}: {NO_MANIFEST}",
            f"{OLDER}: {NO_MANIFEST}",
            "no checkpoint can be loaded; restore one, or set run.name to a new name to start at step 0",
        ],
    ),
    "a path without a checkpoint": (
        nothing,
        ("run.name=new", "resume.checkpoint=elsewhere/step-00000002"),
        [no_such("elsewhere/step-00000002")],
    ),
    "a path of another name": (nothing, ("run.name=new", "resume.checkpoint=model"), [no_such("model")]),
    "a path of what was set aside": (
        lambda folder: (folder / NEWEST).rename(folder / f"{NEWEST}.broken"),
        ("run.name=new", f"resume.checkpoint={NEWEST}.broken"),
        [no_such(f"{NEWEST}.broken")],
    ),
    "a path of a damaged one": (
        removed(f"{NEWEST}/.metadata"),
        ("run.name=new", f"resume.checkpoint={NEWEST}"),
        [
            f"{NEWEST}: .metadata is missing",
            "no checkpoint can be loaded; restore one, or set resume.checkpoint to another",
        ],
    ),
    "never, and there is one": (
        nothing,
        ("resume.checkpoint=never",),
        [
            'resume.checkpoint = "never" but runs/run already holds a run; set run.name to a new name, or '
            'resume.checkpoint = "auto" to resume from its newest checkpoint'
        ],
    ),
    "other settings": (
        nothing,
        ("optim.lr=3e-6", "rollout.temperature=0.5"),
        [
            "since the checkpoint of step 2, optim.lr was 0.01 and is 3e-06; rollout.temperature was 1.0 and is 0.5; "
            'set this back, or set resume.changed = ["optim.lr", "rollout.temperature"] to resume with the change'
        ],
    ),
    "another optimizer": (
        nothing,
        ("optim.name=sgd", 'resume.changed=["optim"]'),
        [
            'the checkpoint of step 2 holds the state of optim.name = "adamw", but now it is "sgd"; set it back, or '
            "start a new run from the exported model"
        ],
    ),
    "another learner": (
        nothing,
        ("advantage.estimator=gae", 'resume.changed=["advantage", "critic"]'),
        [
            "the checkpoint of step 2 holds policy, but this run trains policy and critic; set advantage.estimator "
            "back, or start a new run from the exported model"
        ],
    ),
}


def resigned(name: str, content: bytes) -> Change:
    """Another content for a file of the newest checkpoint, to which its manifest agrees."""

    def change(folder: Path) -> None:
        (folder / NEWEST / name).write_bytes(content)
        manifest(lambda held: held["files"].update({name: digest_of(folder / NEWEST / name)}))(folder)

    return change


# What only loading shows.
UNLOADABLE: dict[str, tuple[Change, str]] = {
    "a table that runs code": (
        lambda folder: (
            written(f"{NEWEST}/.metadata", pickle.dumps(print))(folder),
            manifest(lambda content: content["files"].update({".metadata": digest_of(folder / NEWEST / ".metadata")}))(
                folder
            ),
        ),
        f"{NEWEST} cannot be loaded: the checkpoint's .metadata names builtins.print, which does not belong there",
    ),
    "a table of another kind": (
        resigned(".metadata", pickle.dumps({})),
        "its .metadata is no table of tensors, but dict",
    ),
    "tensors that run code": (
        resigned(TENSORS, pickle.dumps(print)),
        "cannot be loaded: its tensors are not what a run writes",
    ),
    "tensors of nothing": (resigned(TENSORS, bytes(10**5)), "cannot be loaded: its tensors are not what a run writes"),
    "a table cut off": (resigned(".metadata", b"\x80"), "cannot be loaded: pickle data was truncated"),
    "a state without learners": (
        resigned("state.json", b"{}"),
        "state.json is of another form: learners: field required",
    ),
    "a state that is a list": (resigned("state.json", b"[]"), "state.json is of another form"),
    "a place that is no number": (
        resigned("collector.json", b'{"cursor": "4", "sampling": {}, "carried": []}'),
        "collector.json is of another form: cursor: input should be a valid integer",
    ),
    "a model of other sizes": (
        lambda folder: save_tiny_model(folder / "model", hidden_size=64, num_layers=1),
        f"{NEWEST} belongs to another model: model.lm_head.weight is",
    ),
    "a model of fewer layers": (
        lambda folder: save_tiny_model(folder / "model", hidden_size=32, num_layers=2),
        f"{NEWEST} belongs to another model: model.model.layers.1.input_layernorm.weight is absent in the "
        "checkpoint and [32] in this run, and 10 others differ; set model.path to the model that it was trained from",
    ),
}


def digest_of(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def function(source: str) -> Change:
    """A reward function's file, and the term that names it."""

    def change(folder: Path) -> None:
        (folder / "reward.py").write_text(source)
        replaced('kind = "exact"', f'kind = "function", function = "{folder}/reward.py:f"')(folder)

    return change


ARGUMENTS = "prompt, response, answer, metadata"
FUNCTIONS = {
    "absent": Case(replaced('"exact"', '"function", function = "absent.py:f"'), "there is no file absent.py"),
    "an absent module": Case(replaced('"exact"', '"function", function = "absent:f"'), "there is no module absent"),
    "no name": Case(replaced('"exact"', '"function", function = "f"'), "must look like package.module:function"),
    "no such function": Case(function("def ff(): pass"), "reward.py has no function or class f"),
    "not callable": Case(function("f = 3"), "reward.py is neither a function nor a class, but int"),
    "another signature": Case(function("def f(x): return 0"), "f must take the keyword arguments prompt, response"),
    "bad syntax": Case(function("def f(:"), "SyntaxError"),
    "an import that fails": Case(function("import no_such_package"), "No module named 'no_such_package'"),
    "an end while imported": Case(function("import sys; sys.exit(3)"), "SystemExit: 3"),
    "a death while imported": Case(function("import os; os._exit(3)"), "cannot be loaded"),
    "a first sample that raises": Case(
        function(f"def f({ARGUMENTS}): return metadata['x']"), "function: KeyError: 'x'"
    ),
}

TABLES = {"folder": FOLDERS, "toml": TOML, "data": DATA, "model": MODEL, "function": FUNCTIONS}
CASES = {f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    save_tiny_model(folder / "model", hidden_size=32, num_layers=1)
    (folder / "rows.jsonl").write_text(GOOD_ROW)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    (tmp_path / "c.toml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def test_the_good_folder_is_good(folder: Path) -> None:
    assert main([str(folder / "c.toml"), "--dry-run"]) == 0


@pytest.mark.parametrize("name", CASES)
def test_one_sentence_and_the_exit_code(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setattr(tokenizer, "RENDER_S", 0.5)
    case.change(folder)
    assert main([str(folder / "c.toml"), *case.overrides, *(["--dry-run"] if case.dry_run else [])]) == 2
    said = capsys.readouterr().err
    assert said.count("cannot start:") == 1 and case.sentence in said
    # A traceback only of code of the user's own.
    assert "Traceback" not in said or name.startswith("function: ")
    assert not case.dry_run or name.startswith("folder: ") or not (folder / "runs").exists()


@pytest.mark.parametrize("is_trusted", [False, True])
def test_code_beside_a_model_runs_only_where_it_is_trusted(folder: Path, is_trusted: bool) -> None:
    ran = folder / "ran"
    own = f"import transformers\nopen({str(ran)!r}, 'w')\nclass Own(transformers.PreTrainedTokenizerFast): pass\n"
    (folder / "model/own.py").write_text(own)
    named = {"auto_map": {"AutoTokenizer": [None, "own.Own"], "AutoProcessor": "own.Own"}, "tokenizer_class": "Own"}
    json_with("model/tokenizer_config.json", **named)(folder)
    (folder / "model/preprocessor_config.json").write_text(json.dumps(named))
    assert main([str(folder / "c.toml"), f"model.trust_remote_code={str(is_trusted).lower()}", "--dry-run"]) == 0
    assert ran.exists() is is_trusted


@pytest.fixture(scope="module")
def trained(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, whose configuration names no place, so that it can be copied."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(good, folder, dirs_exist_ok=True)
    (folder / "c.toml").write_text(CONFIG.format(folder="."))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*AGAIN, "checkpoint.every=1"]) == 0
    return folder


AGAIN = (
    "c.toml",
    "run.num_steps=2",
    "run.threads_per_rank=1",
    "export.at_end=false",
    "report.tensorboard=false",
    "debug.save_rollouts=2",
)
RUN_TOO = {"tensors cut off", *(RESUMES.keys() - DAMAGES.keys())}  # of the damages one, for the time that runs take


@pytest.fixture
def stopped(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", RESUMES)
def test_a_dry_run_says_of_checkpoints_what_the_run_says(
    stopped: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, overrides, sentences = RESUMES[name]
    change(stopped)
    before = contents(stopped / CHECKPOINTS_OF_RUN)
    for flags in (["--dry-run"], []) if name in RUN_TOO else (["--dry-run"],):
        assert main([*AGAIN, *overrides, *flags]) == 2
        said = re.sub(r"\d+(?= of \d+ bytes| bytes| were written)", "N", capsys.readouterr().err)
        expected = [f"cannot start: {sentences[0]}"] if len(sentences) == 1 else ["cannot start:", *sentences]
        assert said.splitlines() == [*expected[:1], *(f"  - {sentence}" for sentence in expected[1:])]
        assert contents(stopped / CHECKPOINTS_OF_RUN) == before


@pytest.mark.parametrize("name", UNLOADABLE)
def test_what_only_loading_a_checkpoint_shows(stopped: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, sentence = UNLOADABLE[name]
    change(stopped)
    assert without_curves(main, [*AGAIN]) == 2
    said = capsys.readouterr().err
    assert said.count("cannot start: ") == 1 and sentence in said and "Traceback" not in said
    report = read_error(FaultFiles(stopped / "runs/run"))
    assert report is not None and report.kind == "user" and sentence in report.message


def test_tools_load_no_checkpoint_that_is_not_whole(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flipped(f"{NEWEST}/{TENSORS}")(stopped)
    flipped(f"{OLDER}/{TENSORS}")(stopped)
    changed = f"cannot be loaded: {TENSORS} was changed after it was written"
    assert export(["runs/run"]) == 2
    assert capsys.readouterr().err == f"cannot export: {NEWEST} {changed}; name another by --step\n"
    assert replay(["runs/run", "--step", "2"]) == 2
    assert f"cannot replay: {OLDER} {changed}; replay another step" in capsys.readouterr().err


def test_a_dry_run_says_where_the_run_begins(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def begins(*overrides: str) -> list[str]:
        assert main([*AGAIN, *overrides, "--dry-run"]) == 0
        return capsys.readouterr().out.partition("# begins\n")[2].partition("\n\n")[0].splitlines()

    looked = "- its files are there and as large as they were written; what is in them is compared by the run itself"
    assert begins("run.name=new") == ["at step 0: there is no checkpoint to go on from"]
    assert begins("checkpoint.every=1") == [f"after step 2 of 2: {NEWEST}", looked]
    changed = "checkpoint.every was 1 and is 0; run.num_steps was 2 and is 9"
    assert begins("run.num_steps=9") == [f"after step 2 of 9: {NEWEST}", looked, f"- changed since step 2: {changed}"]
    named = f"resume.checkpoint={OLDER}"
    assert begins("run.name=new", "checkpoint.every=1", named) == [f"after step 1 of 2: {OLDER}", looked]
    (stopped / NEWEST / MANIFEST).unlink()
    (stopped / f"{NEWEST}.unfinished").mkdir()
    assert begins("checkpoint.every=1", "resume.allow_older=true") == [
        f"after step 1 of 2: {OLDER}",
        looked,
        "- the previous launch was killed while writing or deleting step-00000002.unfinished; resuming from step 1",
        "- step-00000002: manifest.json is missing; renamed to broken, resuming from step 1",
    ]
    assert (stopped / NEWEST).is_dir()


def test_steps_without_rows_are_named_before_a_run_goes_on(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = stopped / "runs/run/metrics.jsonl"
    rows = metrics.read_bytes().splitlines(keepends=True)
    noted = "metrics.jsonl has no row of step 2, although it was finished"
    for content, says_so in ((b"".join(rows), False), (rows[0] + rows[1][:9], True)):
        metrics.write_bytes(content)
        for flags in (["--dry-run"], []) if says_so else (["--dry-run"],):
            assert main([*AGAIN, "checkpoint.every=1", "run.num_steps=3", *flags]) == 0
            assert (noted in capsys.readouterr().out) is says_so
    assert [row["step"] for row in read_rows(metrics)] == [1, 3]


# What a reward function does in the middle of a run. The function is told by the response what to do.

MISBEHAVIOUR = '''
import asyncio, ctypes, decimal, os, resource, signal, subprocess, sys, threading, time

class Unspeakable(Exception):
    def __str__(self): raise self

class Claims:
    def __float__(self): return 1.0

def recurse(): recurse()

def bomb():
    """Children that leave the session, as many as any machine bears."""
    for _ in range(40):
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", "600.4"])
    time.sleep(600)

def leak():
    held = []
    while True: held.append(bytearray(2**24))

def raises(error): raise error

def loud():
    for stream in (sys.stdout, sys.stderr):
        stream.write("noise" * 100_000)
    return 1.0

def f(prompt, response, answer, metadata):
    return eval(response)
'''
NOT_A_NUMBER = "function: TypeError: the reward is not a number but"
SURVIVED: dict[str, str | None] = {  # what is done: the failure that is counted, None for a reward of 1
    "raises(ValueError('wrong'))": "function: ValueError: wrong",
    "raises(KeyboardInterrupt())": "function: KeyboardInterrupt: ",
    "raises(Unspeakable())": "function: Unspeakable: its text cannot be read: Unspeakable",
    "sys.exit(0)": "function: SystemExit: 0",
    "os._exit(0)": "the worker exited with code 0",
    "os.kill(os.getpid(), signal.SIGKILL)": "the worker was killed by SIGKILL",
    "os.abort()": "the worker was killed by SIGABRT",
    "ctypes.string_at(0)": "the worker was killed by SIGSEGV",
    "time.sleep(600)": "timeout",
    "any(0 for _ in iter(int, 1))": "timeout",
    "threading.Event().wait()": "timeout",
    "subprocess.run(['sleep', '600'])": "timeout",
    "bomb()": "timeout",
    "asyncio.sleep(600)": "timeout",
    "leak()": "function: MemoryError: ",
    "recurse()": "function: RecursionError: maximum recursion depth exceeded",
    "float('nan')": "function: ValueError: the reward is nan",
    "float('inf')": "function: ValueError: the reward is inf",
    "10**400": "function: ValueError: the reward is inf",
    "1e308": "function: ValueError: the reward is 1e+308, which is beyond +-1e+12",
    "-1e39": "function: ValueError: the reward is -1e+39, which is beyond +-1e+12",
    "raises(ValueError('\\ud800 \\x1b[2J\\rstep 99/1'))": ("function: ValueError: \\ud800 \\x1b[2J"),
    "'1.0'": f"{NOT_A_NUMBER} str",
    "None": f"{NOT_A_NUMBER} NoneType",
    "[1.0]": f"{NOT_A_NUMBER} list",
    "1j": f"{NOT_A_NUMBER} complex",
    "decimal.Decimal(1)": f"{NOT_A_NUMBER} Decimal",
    "Claims()": f"{NOT_A_NUMBER} Claims",
    "lambda: 1.0": f"{NOT_A_NUMBER} function",
    "open('large', 'wb').write(bytes(2**22)) and 1.0": "function: OSError: [Errno 27] File too large",
    "len([open('/dev/null') for _ in range(99)])": "function: OSError: [Errno 24] Too many open files: '/dev/null'",
    "loud()": None,
    "sys.stdin.close() or 1.0": None,
    "os.closerange(0, 3) or 1.0": None,
    "sys.stdout.close() or 1.0": None,
    "True": None,
}


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardPool]:
    path = tmp_path_factory.mktemp("functions") / "misbehaviour.py"
    path.write_text(MISBEHAVIOUR)
    sandbox = SandboxConfig(max_memory_gib=0.25, max_file_gib=2**-10, max_open_files=64)
    term = FunctionReward(kind="function", function=f"{path}:f")
    with RewardPool(RewardConfig(terms=(term,), timeout_s=2.0, num_workers=4, sandbox=sandbox)) as pool:
        yield pool


@pytest.mark.slow
def test_reward_functions_that_misbehave_are_counted_and_survived(misbehaving: RewardPool) -> None:
    # After each a good one, which must not suffer.
    attempts = [response for bad in SURVIVED for response in (bad, "1.0")]
    outcomes = outcomes_of(misbehaving, *[item(attempt) for attempt in attempts])
    assert dict(zip(attempts, (outcome.failure for outcome in outcomes), strict=True)) == SURVIVED | {"1.0": None}
    assert {outcome.reward for outcome in outcomes if outcome.failure is None} == {1.0}
    assert {outcome.reward for outcome in outcomes if outcome.failure is not None} == {0.0}
    if not misbehaving.unprotected:
        assert wait_for(lambda: not running("sleep", "600.4"))
    response = Response(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", spans=(Span(0, 1),))
    prompt = Prompt(prompt_id=0, token_ids=(1,), text="", answer=None, task="", metadata={})
    rollout = one_turn(prompt, response)
    rewarded = [RewardedRollout(index=0, rollout=rollout, outcome=outcome) for outcome in outcomes]
    num_failed = sum(failure is not None for failure in SURVIVED.values())
    assert rollout_metrics(rewarded)["reward/failed_count"] == Total(num_failed)
    num_timeouts = list(SURVIVED.values()).count("timeout")
    told = failure_lines(1, rewarded)
    assert f"step 1: {num_timeouts} of this rank's rewards are 0: timeout" in told
    assert len(told) == 4 and sum(int(one.split()[2]) for one in told) == num_failed
