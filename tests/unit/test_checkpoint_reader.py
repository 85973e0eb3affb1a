"""Checkpoints are read as data: the same values as torch reads, and nothing in them is called."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from spmdrl.checkpoint_reader import DataOnlyPlanner, load_data_only
from spmdrl.types import UserError


class Calls:
    """Pickled, it is a call that makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp.save({"policy": {"w": torch.arange(6.0), "b": torch.ones(2, dtype=torch.bfloat16)}}, checkpoint_id=tmp_path)
    return tmp_path


def load(folder: Path) -> dict[str, Any]:
    state = {"policy": {"w": torch.zeros(6), "b": torch.zeros(2, dtype=torch.bfloat16)}}
    load_data_only(state, folder)
    return state["policy"]


def test_values_are_those_that_were_saved(saved: Path) -> None:
    policy = load(saved)
    assert torch.equal(policy["w"], torch.arange(6.0))
    assert torch.equal(policy["b"], torch.ones(2, dtype=torch.bfloat16))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        load(folder)
    return str(raised.value)


def test_nothing_is_called(saved: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    content = pickle.dumps(Calls(made))
    (saved / ".metadata").write_bytes(content)
    assert f"names {os.mkdir.__module__}.mkdir, which could run code" in refusal(saved)
    assert not made.exists()
    pickle.loads(content)
    assert made.exists()  # it would have been


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:99], lambda data: b"\xff" + data])
def test_damaged_metadata(saved: Path, damage: Any) -> None:
    (saved / ".metadata").write_bytes(damage((saved / ".metadata").read_bytes()))
    assert "is damaged: .metadata" in refusal(saved)


def test_no_metadata(saved: Path) -> None:
    (saved / ".metadata").unlink()
    assert "cannot be read: " in refusal(saved)


def test_other_values_are_read_as_weights_are(tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(Calls(tmp_path / "made"), content)
    content.seek(0)
    index = MetadataIndex("extra")
    item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size([0]), index, torch.Size([0]), torch.Size([0]))
    with pytest.raises(UserError, match="checkpoint's extra is not one of ours"):
        DataOnlyPlanner().load_bytes(item, content)
    assert not (tmp_path / "made").exists()
