"""Attention in which the tokens of images see each other equals a softmax with that mask, forward and backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spmdrl.model.attention import Block, packed_attention
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.kernels import Kernel
from spmdrl.types import UserError
from tests.helpers import flash_on_cpu  # gives torch's varlen kernel an implementation on a CPU

SEQLENS = [3, 12, 1, 20]
CU_SEQLENS = torch.tensor([0, *SEQLENS]).cumsum(0).int()
# The first two are neighbours, the last is at the end.
BLOCKS = [Block(4, 8), Block(8, 10), Block(20, 29), Block(33, 36)]
SCALE = 0.3


def inputs(head_dim: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    total = sum(SEQLENS)
    return [torch.randn(1, heads, total, head_dim, dtype=torch.float32, requires_grad=True) for heads in (4, 2, 2)]


def written_out(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One softmax over all tokens, with a mask that says who sees whom."""
    token = torch.arange(sum(SEQLENS))
    sees = token[:, None] >= token
    for block in BLOCKS:
        sees[block.start : block.end, block.start : block.end] = True
    if window is not None:
        sees &= token > token[:, None] - window
    within = torch.zeros_like(sees)
    for start, end in pairwise(CU_SEQLENS.tolist()):
        within[start:end, start:end] = True
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = (SCALE * q @ k.transpose(-1, -2)).masked_fill(~(sees & within), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("kernel", "head_dim"), [("sdpa", 8), ("varlen", 8), ("varlen", 12)])
def test_blocks_are_seen_whole(kernel: Kernel, head_dim: int, window: int | None) -> None:
    """Heads of 12 are not FlashAttention's."""
    assert flash_on_cpu
    layer = AttentionLayer(index=0, scale=SCALE, window=window)
    attend = packed_attention(CU_SEQLENS, SEQLENS, kernel, blocks=BLOCKS)
    mine, others = inputs(head_dim), inputs(head_dim)
    found, expected = attend(*mine, layer), written_out(*others, window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weights = torch.randn_like(expected)
    for out in (found, expected):
        (out * weights).sum().backward()
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)


def test_blocks_of_layers_with_windows_are_causal_in_others() -> None:
    q, k, v = inputs()
    blocks = [block._replace(only_in_windows=True) for block in BLOCKS]
    of_windows = packed_attention(CU_SEQLENS, SEQLENS, "sdpa", blocks=blocks)
    for window, blocks_seen in ((5, BLOCKS), (None, ())):
        layer = AttentionLayer(index=0, scale=SCALE, window=window)
        expected = packed_attention(CU_SEQLENS, SEQLENS, "sdpa", blocks=blocks_seen)(q, k, v, layer)
        assert torch.equal(of_windows(q, k, v, layer), expected)


def test_a_kernel_that_is_only_causal_is_refused() -> None:
    with pytest.raises(UserError, match="cannot let the tokens of an image see each other"):
        packed_attention(CU_SEQLENS, SEQLENS, "invariant", blocks=BLOCKS)
