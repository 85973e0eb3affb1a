"""Triton's tiles of logits equal torch's, in Triton's interpreter on a CPU or, where there is one, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

import spmdrl.model.logprobs
from spmdrl.model import logits_tile, logits_tile_triton
from spmdrl.model.linear import linear
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import Head, HeadOptions, next_token_logprobs
from tests.helpers.logits_tiles import (
    PEAK_TILE_ELEMENTS,
    SIZES,
    case,
    peak_over_prediction,
    products_added,
    require_same,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HIDDEN, VOCABULARY = 7, 6, 101


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (0.7, 4.0)])
def test_a_tile_by_triton_is_the_tile_by_torch(dtype: torch.dtype, temperature: float, softcap: float | None) -> None:
    for size in SIZES:
        require_same(logits_tile_triton, logits_tile, case(*size, dtype, DEVICE), temperature, softcap)


def test_logits_that_are_not_numbers_are_not_hidden() -> None:
    for bad in (torch.nan, torch.inf):
        logits = torch.zeros(3, 5000, device=DEVICE)
        logits[1, 4500] = bad
        _, total, _, _ = logits_tile_triton.summary(logits, torch.arange(3, device=DEVICE), 0, Scale())
        assert total.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("hidden_size", [8, 512])
def test_the_memory_is_what_is_predicted_for_a_gpu(hidden_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spmdrl.model.logprobs.TILE_ELEMENTS, DEVICE, PEAK_TILE_ELEMENTS)
    with products_added(DEVICE):
        assert 0.85 < peak_over_prediction(logits_tile_triton, torch.bfloat16, hidden_size, on_gpu=True) < 1.1


@pytest.mark.slow
def test_a_teacher_needs_what_is_predicted_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spmdrl.model.logprobs.TILE_ELEMENTS, DEVICE, PEAK_TILE_ELEMENTS)
    with products_added(DEVICE):
        assert 0.75 < peak_over_prediction(logits_tile_triton, torch.bfloat16, 8, on_gpu=True, kind="jsd") < 1.1


def scores_and_gradients(
    head: Head, leaves: list[Tensor], *, chunk: int, temperature: float, used: str
) -> list[Tensor]:
    """Logprobs, entropy, and the gradients of a loss of one or both."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    hidden, weight, bias = leaves
    targets = torch.arange(TOKENS, device=DEVICE) * 13 % VOCABULARY
    scores = next_token_logprobs(hidden, weight, bias, targets, HeadOptions(Scale(temperature), chunk), head=head)
    weights = torch.linspace(-1, 1, TOKENS, device=DEVICE)
    losses = {"logprobs": weights @ scores[0], "entropy": weights.flip(0) @ scores[1]}
    loss = sum(losses.values()) if used == "both" else losses[used]
    return [*(score.detach() for score in scores), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("used", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize(("chunk", "temperature"), [(3, 0.7), (100, 1.0)])
def test_the_head_by_triton_is_the_head_by_torch(
    chunk: int, temperature: float, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(spmdrl.model.logprobs.TILE_ELEMENTS, DEVICE, 200)  # several slabs of the vocabulary
    draw = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    leaves = [torch.randn(shape, generator=draw).to(DEVICE) for shape in shapes]
    leaves[2][torch.arange(VOCABULARY) % 13 == 12] = -torch.inf  # no target is forbidden
    ours, theirs = (
        scores_and_gradients(Head(linear, tile=tile), leaves, chunk=chunk, temperature=temperature, used=used)
        for tile in (logits_tile_triton, logits_tile)
    )
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)
