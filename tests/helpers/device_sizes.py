"""Sizes of tests on a CUDA device, and smaller ones where the device is emulated; what they assert is the same."""

from __future__ import annotations

import sys
from typing import TypeVar

import pytest

T = TypeVar("T")

EMULATED = "emulated_cuda" in sys.modules  # its start-up imports it in every process

needs_kernels = pytest.mark.skipif(EMULATED, reason="needs a CUDA device that is not emulated: kernels of SGLang run")
CUT_OFF = "Triton's interpreter cuts bfloat16 off instead of rounding it"


def sized(on_a_gpu: T, *, emulated: T) -> T:
    """Return the size for this device."""
    return emulated if EMULATED else on_a_gpu
