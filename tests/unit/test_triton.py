"""Fused operations by Triton's kernels equal the plain ones, in Triton's interpreter on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spmdrl.model import fused, fused_plain
from tests.helpers.fused_cases import CASES, EMPTY, HALF, Case, gradients, inputs_of

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("there is a device, on which tests/gpu/test_fused.py runs the kernels", allow_module_level=True)

from spmdrl.model import fused_triton

KERNELS = [case for case in CASES if case.name != "norm"]  # torch's own kernel on CUDA


def computed(case: Case, by: Any, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Result and gradients by these kernels."""
    with monkeypatch.context() as patch:
        patch.setattr(fused, "kernels_for", lambda *_: by)
        return gradients(case.fused, inputs)


@pytest.mark.parametrize("case", [*KERNELS, *EMPTY], ids=str)
def test_kernels_equal_plain_functions(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs_of(case, torch.float32)
    ours, plain = (computed(case, by, given, monkeypatch) for by in (fused_triton, fused_plain))
    assert len(ours) == len(plain) > 1
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", [*KERNELS, *EMPTY], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_kernels_round_half_precision_once(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in another order may put a number that lies between two of the dtype's on the other side."""
    given = [x.to(dtype) for x in inputs_of(case, torch.float32)]
    ours, plain = (computed(case, by, given, monkeypatch) for by in (fused_triton, fused_plain))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=torch.finfo(dtype).eps, atol=1e-6)
        if dtype == torch.float16:  # the interpreter cuts bfloat16 off instead of rounding it
            assert (one != other).sum() <= 0.01 * one.numel() + 1


def test_a_weights_gradient_is_summed_over_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("head norm", (23, 5, 16))
    given = inputs_of(case, torch.float32)
    plain = computed(case, fused_plain, given, monkeypatch)
    monkeypatch.setattr(fused_triton, "_PROGRAMS", 3)  # each has several blocks of heads, and not all as many
    for one, other in zip(computed(case, fused_triton, given, monkeypatch), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
