"""All ranks multiply by the kernels that the first one chose, and a run keeps those that it began with."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from spmdrl.config import Config, read_draft
from spmdrl.cpu import linear_layers
from spmdrl.cpu.kernels_c import CannotCompile, compiled_in_use
from spmdrl.cpu.linear_layers import LinearKernels, kernels_in_use
from spmdrl.report import RunFolder
from spmdrl.run import open_run
from spmdrl.tools.tiny_model import save_tiny_model
from spmdrl.types import UserError
from tests.helpers.ranks import run_ranks
from tests.helpers.small_run import write_config

FIRST, SECOND = LinearKernels("onednn", "mkl", "onednn"), LinearKernels("mkl", "onednn", "mkl")


def kernels_of_a_run(config: str, folder: str) -> dict[str, Any] | str:
    """The kernels inside a run in whose measurements every rank finds something else; nobody measured before."""
    mine = FIRST if os.environ["RANK"] == "0" else SECOND
    with (
        mock.patch.object(linear_layers, "measure", lambda shapes: asdict(mine)),
        mock.patch.object(linear_layers, "users_cache", lambda: Path(folder, "cache")),
    ):
        try:
            with open_run(read_draft(Config, config, []).config, RunFolder(Path(folder))) as run:
                assert run.machine == run.machine | {
                    "linear_kernels": asdict(kernels_in_use()),
                    "layers_in_c": compiled_in_use(),
                }
                return asdict(kernels_in_use())
        except UserError as error:
            return str(error)
        finally:
            assert kernels_in_use() == LinearKernels()  # nothing is left of it in this process


def test_ranks_agree_and_a_run_keeps_what_it_began_with(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32)
    config = str(write_config(tmp_path))
    machine = tmp_path / "machine.json"
    assert run_ranks(2, kernels_of_a_run, config, str(tmp_path)) == [asdict(FIRST)] * 2
    machine.write_text(json.dumps({"linear_kernels": asdict(SECOND)}))
    assert run_ranks(2, kernels_of_a_run, config, str(tmp_path)) == [asdict(SECOND)] * 2
    machine.write_text(json.dumps({"linear_kernels": {**asdict(SECOND), "few_rows": ["fast"]}}))
    for said in run_ranks(2, kernels_of_a_run, config, str(tmp_path)):
        assert "machine.json: linear_kernels: " in said and "remove the file to choose them again" in said
    machine.write_text("{")
    for said in run_ranks(2, kernels_of_a_run, config, str(tmp_path)):
        assert "machine.json is not valid JSON" in said


def layers_of_a_run(config: str, folder: str, unable: int) -> bool | str:
    """True where layers are computed in C, in a run where one rank cannot compile; or what the run said."""
    failing = mock.patch.object(linear_layers, "compile_all", side_effect=CannotCompile("there is no C compiler"))
    try:
        with (
            failing if os.environ["RANK"] == str(unable) else nullcontext(),
            open_run(read_draft(Config, config, []).config, RunFolder(Path(folder))),
        ):
            return compiled_in_use()
    except UserError as error:
        return str(error)
    finally:
        assert not compiled_in_use()


def test_layers_are_in_c_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32)
    arguments = (str(write_config(tmp_path)), str(tmp_path))
    nobody, machine = -1, tmp_path / "machine.json"
    assert run_ranks(2, layers_of_a_run, *arguments, nobody) == [True, True]
    assert run_ranks(2, layers_of_a_run, *arguments, 1) == [False, False]
    machine.write_text(json.dumps({"layers_in_c": False}))
    assert run_ranks(2, layers_of_a_run, *arguments, nobody) == [False, False]
    machine.write_text(json.dumps({"layers_in_c": True}))
    for said in run_ranks(2, layers_of_a_run, *arguments, 1):
        assert "so far, and rank 1 cannot: there is no C compiler; or remove the file" in said
