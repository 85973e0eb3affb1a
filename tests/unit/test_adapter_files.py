"""Directories of adapters that others wrote: what is malformed is said in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from spmdrl.model.lora.adapters import PREFIX
from spmdrl.model.lora.peft import CONFIG, read_adapter, write_adapter
from spmdrl.types import UserError

GOOD = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stem = f"{PREFIX}layers.0.q_proj.lora_"
    write_adapter(tmp_path, GOOD, {f"{stem}A.weight": torch.ones(2, 3), f"{stem}B.weight": torch.ones(3, 2)})
    return tmp_path


def test_what_was_written_is_read(folder: Path) -> None:
    read = read_adapter(str(folder))
    assert (read.strength.rank, read.strength.alpha) == (2, 4) and len(read.tensors) == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "is of another form"),
        ('{"r": 2, "r": 2}', 'has the key "r" twice'),
        (json.dumps(GOOD | {"target_parameters": 3}), "form: target_parameters: input should be a valid list"),
        (json.dumps(GOOD | {"peft_type": "IA3"}), 'has peft_type = "IA3"'),
    ],
)
def test_a_description_of_another_form_is_refused(folder: Path, content: str, sentence: str) -> None:
    (folder / CONFIG).write_text(content)
    with pytest.raises(UserError, match=sentence):
        read_adapter(str(folder))
