"""Kernels for float32 on a CPU: products, layers in C, attention of short sequences, and a decoder.

An optional room: `model/cpu_room.py` imports it where it is installed, and describes the functions below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from spmdrl.cpu import kernels_c as fused
from spmdrl.cpu.kernels_c import attend_packed, attend_to_cache, attend_to_rows, serves
from spmdrl.cpu.linear_layers import agree, describe, layers, linear, outer

__all__ = [
    "agree",
    "attend_packed",
    "attend_to_cache",
    "attend_to_rows",
    "decoder",
    "describe",
    "fused",
    "layers",
    "linear",
    "outer",
    "serves",
]


def decoder(model: Any, adapters: Any) -> Callable[..., Tensor] | None:
    """Return a decoder for the torch engine's model; None for a model of another family."""
    from spmdrl.cpu.dense_decoder import DenseDecoder, can_decode  # a trainer needs no engine

    return DenseDecoder(model, adapters) if can_decode(model) else None
