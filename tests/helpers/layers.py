"""Layers in C or in torch, for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmdrl.cpu.kernels_c import compile_all, use_compiled


@contextmanager
def layers_in_c(on: bool = True) -> Iterator[None]:
    """Compute layers in C, or not, while it is open."""
    if on:
        compile_all()
    before = use_compiled(on)
    try:
        yield
    finally:
        use_compiled(before)
