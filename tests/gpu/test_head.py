"""The head on a CUDA device: Triton's tiles are torch's, nothing waits for the device, memory is as predicted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import spmdrl.model.logprobs
from spmdrl.model import logits_tile
from spmdrl.model.linear import linear
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import FAST_HEAD, Head, HeadOptions, next_token_logprobs
from spmdrl.step.batch import lay_end_to_end
from tests.helpers.device_sizes import CUT_OFF, EMULATED, sized
from tests.helpers.logits_tiles import (
    PEAK_TILE_ELEMENTS,
    SIZES,
    case,
    peak_over_prediction,
    products_added,
    require_same,
)
from tests.helpers.policies import policy_of
from tests.helpers.sequences import random_sequences

pytestmark = pytest.mark.kernels

HEAD = pytest.mark.claim(
    "Attention and models",
    "The head's tiles in Triton equal torch's and are no further from float64; a forward pass waits for nothing; the "
    "head's memory is as predicted.",
)

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def adds_products() -> Iterator[None]:
    """An emulated device has no kernel that adds a product to a sum; with one it takes the way of a real device."""
    with products_added("cuda"):
        yield


@HEAD
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, None), (0.7, 4.0)])
def test_a_tile_by_triton_is_the_tile_by_torch(dtype: torch.dtype, temperature: float, softcap: float | None) -> None:
    from spmdrl.model import logits_tile_triton

    for size in (*SIZES, sized((2048, 8192), emulated=(64, 3000))):
        require_same(logits_tile_triton, logits_tile, case(*size, dtype, "cuda"), temperature, softcap)


@HEAD
@pytest.mark.skipif(EMULATED, reason=CUT_OFF)
def test_the_whole_head_is_no_further_from_float64_than_with_torchs_tiles() -> None:
    torch.manual_seed(0)
    tokens, width, vocabulary = 3000, 256, 20_000
    hidden = torch.randn(tokens, width, device=CUDA).bfloat16()
    weight = torch.randn(vocabulary, width, device=CUDA).mul_(width**-0.5).bfloat16()
    targets = torch.arange(tokens, device=CUDA) * 7 % vocabulary
    slope = torch.linspace(-1, 1, tokens, device=CUDA)

    def results(head: Head | None) -> list[torch.Tensor]:
        wide = torch.float64 if head is None else torch.bfloat16
        leaves = [leaf.to(wide).requires_grad_() for leaf in (hidden, weight)]
        if head is None:
            log_p = (leaves[0] @ leaves[1].T / 0.7).log_softmax(-1)
            scores = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        else:
            scores = next_token_logprobs(leaves[0], leaves[1], None, targets, HeadOptions(Scale(0.7), 2048), head)
        gradients = torch.autograd.grad((slope * (scores[0] + 0.3 * scores[1])).sum(), leaves)
        return [x.detach().double() for x in (*scores, *gradients)]

    exact = results(None)
    for ours, torchs, true in zip(results(FAST_HEAD), results(Head(linear, tile=logits_tile)), exact, strict=True):
        assert (ours - true).norm() <= 1.05 * (torchs - true).norm() + 1e-9 * true.norm()


@HEAD
def test_a_forward_pass_never_waits_for_the_device() -> None:
    sizes = sized({}, emulated={"hidden_size": 128, "intermediate_size": 256, "head_dim": 32})
    policy = policy_of("none", dtype=torch.bfloat16, kernel="varlen", num_hidden_layers=2, **sizes).to(CUDA)
    micro_batch = lay_end_to_end(random_sequences(6), {})
    policy(micro_batch)  # kernels are compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores = policy(micro_batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(scores.logprobs.cpu() != 0, micro_batch.loss_mask)


@HEAD
def test_the_memory_is_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spmdrl.model.logprobs.TILE_ELEMENTS, "cuda", PEAK_TILE_ELEMENTS)
    assert 0.85 < peak_over_prediction(FAST_HEAD.tile_on("cuda"), torch.bfloat16, 512, on_gpu=True) < 1.1
