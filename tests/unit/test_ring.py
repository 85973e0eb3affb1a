"""Which runs take ring_flash_attn when they are not told."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from spmdrl.model.context import is_for_ring_attention


class Attention(nn.Module):
    def __init__(self, sinks: bool) -> None:
        super().__init__()
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("cp", "style", "sinks", "installed", "expected"),
    [
        (2, "all_gather", False, {"flash_attn", "ring_flash_attn"}, True),
        (1, "all_gather", False, {"flash_attn", "ring_flash_attn"}, False),
        (2, "ulysses", False, {"flash_attn", "ring_flash_attn"}, False),
        (2, "all_gather", True, {"flash_attn", "ring_flash_attn"}, False),
        (2, "all_gather", False, {"ring_flash_attn"}, False),
        (2, "all_gather", False, {"flash_attn"}, False),
    ],
)
def test_where_the_package_can_do_it(
    monkeypatch: pytest.MonkeyPatch, cp: int, style: str, sinks: bool, installed: set[str], expected: bool
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
    meshes: Any = SimpleNamespace(cp=SimpleNamespace(size=lambda: cp), cp_style=style)
    assert is_for_ring_attention(nn.Sequential(Attention(sinks)), meshes) == expected
