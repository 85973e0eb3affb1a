"""Fused operations on a device: what plain functions compute in float64, as exactly as transformers' operations do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.helpers.device_sizes import CUT_OFF, EMULATED, sized
from tests.helpers.fused_cases import CASES, EMPTY, HALF, Case, eager, gradients, inputs_of

pytestmark = pytest.mark.kernels
FUSED = pytest.mark.claim(
    "Attention and models",
    "Fused norms, rotary embeddings and SwiGLU equal plain functions, and are no further from the truth than "
    "transformers' operations.",
)

CUDA = torch.device("cuda")


def on_device(x: Tensor) -> Tensor:
    """Copy to the device with the same strides: `Tensor.to` closes the gaps between rows."""
    return x.new_empty(0).set_(x.untyped_storage()).to(CUDA).as_strided(x.shape, x.stride(), x.storage_offset())


@FUSED
@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_kernels_equal_plain_functions(case: Case) -> None:
    given = inputs_of(case, torch.float32)
    ours = gradients(case.fused, list(map(on_device, given)))
    for one, other in zip(ours, gradients(case.fused, [x.double() for x in given]), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)


@FUSED
@pytest.mark.parametrize("case", [case for case in CASES if math.prod(case.shape) > 100], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_no_further_from_the_truth_than_transformers(case: Case, dtype: torch.dtype) -> None:
    if EMULATED and dtype == torch.bfloat16:
        pytest.skip(CUT_OFF)
    given = [x.to(dtype) for x in inputs_of(case, torch.float64)]
    truth = gradients(case.fused, [x.double() for x in given])
    moved = list(map(on_device, given))
    ours, theirs = gradients(case.fused, moved), gradients(eager(case), moved)
    for mine, other, right in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == dtype
        assert (mine.cpu() - right).abs().sum() <= 1.05 * (other.cpu() - right).abs().sum()


@FUSED
def test_a_weights_gradient_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmdrl.model import fused_triton

    monkeypatch.setattr(fused_triton, "_PROGRAMS", sized(fused_triton._PROGRAMS, emulated=4))
    shape = sized((3000, 16, 128), emulated=(13, 16, 32))  # more heads than the programs take at once
    case = Case("head norm", shape)
    given = list(map(on_device, inputs_of(case, torch.bfloat16)))
    once, again = (gradients(case.fused, given) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
