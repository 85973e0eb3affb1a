"""Tools that are given what they cannot use end with exit code 2 and a sentence; what they write, others may read."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch

from spmdrl.config import FileData
from spmdrl.data.sources import FileSource
from spmdrl.model.weight_files import open_to_readers, write_tensors
from spmdrl.tools import runs
from spmdrl.types import UserError

# The tool, its arguments, and what it says; {file} is a file, {folder} an empty folder, {torn} a damaged run,
# {half} one whose configuration was written by half.
REFUSED = [
    ("export", "{file}", "cannot export: cannot read the configuration {file}/config.toml: Not a directory"),
    ("export", "{folder}", "cannot export: cannot read the configuration {folder}/config.toml: No such file"),
    ("replay", "{folder} --step 1", "cannot replay: {folder} is not the folder of a run"),
    ("episodes", "{file} --step 1", "cannot show episodes: {file} is not the folder of a run"),
    ("evaluate", "{file}", "cannot evaluate: cannot read the configuration"),
    ("plot", "{file}", "cannot draw: {file} is not the folder of a run"),
    ("plot", "{torn}", "cannot draw: {torn}/metrics.jsonl is of another form: 0.loss"),
    ("compare", "{torn}", "cannot compare: {torn}/metrics.jsonl is of another form: 0.loss"),
    ("compare", "{half}", "cannot compare: {half}/config.toml is not valid TOML"),
    ("doctor", "{torn}", "cannot examine the run: {torn}/metrics.jsonl is of another form: 0.loss"),
    ("doctor", "{half}", "written again when the run is resumed"),
    ("watch", "{folder} --once", "cannot watch: {folder} holds no run"),
    ("plot", "{folder} --out curves.xyz", "give the file a name that ends in .png"),
    ("ps", "{folder}", "{folder} has no ranks to show"),
    ("text_model", "{file} {folder}/new", "cannot extract: {file} is not a model directory"),
    ("dequantize", "{file} {folder}/new", "cannot dequantize: {file} is not a model directory"),
    ("tiny_model", "{file}", "cannot make a model: {file} exists and is not an empty directory"),
    ("tiny_model", "{torn}", "cannot make a model: {torn} exists and is not an empty directory"),
    ("tiny_model", "{folder}/new --hidden-size 33", "--hidden-size 33: set it to a multiple of 32"),
    ("tiny_model", "{folder}/new --num-layers 0", "--num-layers 0: set it to 1 to 256"),
    ("tiny_model", "{folder}/new --hidden-size 99999999999", "--hidden-size 99999999999: set it to 32 to 8192"),
    ("tiny_model", "/proc/1/new --num-layers 1", "cannot make a model: "),
    ("fit", "{file} --ranks 0 --gpu-gib 80", "--ranks is between 1 and 1000000"),
    ("fit", "{folder}/absent.toml --ranks 8 --gpu-gib 80", "cannot plan: cannot read the configuration"),
    ("fit", "{file} --ranks 8 --gpu-gib nan", "--gpu-gib between 0.1 and 100000"),
    ("parity", "{folder}/absent.toml", "cannot compare: cannot read the configuration"),
    ("verifiers_data", "{file} {folder}/out --limit 0", "--limit must be at least 1"),
    ("doctor", "--unknown", "unrecognized arguments: --unknown"),
    ("doctor", "{folder} --\x9b2J\u202e", "unrecognized arguments: --\\x9b2J\\u202e"),
    ("export", "{folder} --step -1", 'argument --step: "-1": input should be greater than or equal to 0'),
    ("replay", "{folder} --step 1000000000000", 'argument --step: "1000000000000": input should be less than or equal'),
    ("episodes", "{folder} --step a\x9bb", 'argument --step: "a\\x9bb": input should be a valid integer'),
    ("watch", "{folder} --every inf", 'argument --every: "inf": input should be less than or equal to'),
]


@pytest.mark.parametrize(("tool", "arguments", "sentence"), REFUSED)
def test_a_tool_says_what_it_cannot_use(
    tmp_path: Path, tool: str, arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: tmp_path / name for name in ("file", "folder", "torn", "half")}
    places["file"].write_text("no configuration")
    places["folder"].mkdir()
    places["torn"].mkdir()
    (places["torn"] / "metrics.jsonl").write_text('{"step": 1, "loss": "low"}\n')
    places["half"].mkdir()
    (places["half"] / "config.toml").write_text("[rollout\n")
    main = getattr(runs, tool, None) or importlib.import_module(f"spmdrl.tools.{tool}").main
    try:
        code = main(arguments.format(**places).split())
    except SystemExit as error:  # of argparse
        code = error.code
    said = capsys.readouterr().err
    assert code == 2 and sentence.format(**places) in said and "Traceback" not in said


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_tensors_have_the_permissions_of_new_files(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(1)})
        (tmp_path / "b.safetensors").write_bytes(b"")
        (tmp_path / "b.safetensors").chmod(0o600)
        open_to_readers(tmp_path)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "a.safetensors": mode,
        "b.safetensors": mode,
    }


def test_a_column_that_is_there_twice_is_named(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["prompt", "answer", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match='has the column "prompt" twice'):
        FileSource(FileData(kind="parquet", path=str(tmp_path / "rows.parquet")), seed=0)
