"""Weights in a model's files that its architecture does not use, such as layers for multi-token prediction.

They are neither trained nor sampled with, and an export keeps them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel


def kept_names(model: PreTrainedModel, path: str) -> dict[str, Path]:
    """Return the file of each weight in the directory at `path` that transformers leaves out, by its name there."""
    patterns = [re.compile(pattern) for pattern in type(model)._keys_to_ignore_on_load_unexpected or ()]
    found: dict[str, Path] = {}
    for file in sorted(Path(path).glob("*.safetensors")) if patterns else ():
        with safe_open(file, framework="pt") as weights:
            names: Iterable[str] = weights.keys()
            found |= {name: file for name in names if any(pattern.search(name) for pattern in patterns)}
    return found


def read_kept(names: dict[str, Path]) -> dict[str, Tensor]:
    """Read such weights, into host memory."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(names.values())):
        with safe_open(file, framework="pt") as weights:
            tensors |= {name: weights.get_tensor(name) for name, place in names.items() if place == file}
    return tensors


def kept_line(names: Iterable[str]) -> str | None:
    """Tell the user about such weights; None where there are none."""
    ordered = sorted(names)
    if not ordered:
        return None
    return (
        f"{len(ordered)} weights of model.path are no part of what is trained, such as {ordered[0]}: layers for "
        "multi-token prediction and the like; exports keep them as they are"
    )
