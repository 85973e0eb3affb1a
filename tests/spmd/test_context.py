"""Attention over sequences that are cut across ranks equals attention over whole ones, gradients too."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from spmdrl.dist.collectives import sum_over
from spmdrl.model import context, tensor_parallel
from spmdrl.model.attention import Kernel, packed_attention
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.context import Style, context_attention, context_problems, gather_tokens
from spmdrl.types import UserError
from tests.helpers import flash_on_cpu  # noqa: F401
from tests.helpers.context import STYLES, local_part, offsets_of, with_gradients, world_mesh
from tests.helpers.ranks import run_ranks

# 48 tokens: chunks of 24 on two ranks, of 12 on four.
LAYOUTS = {
    "inside chunks": [6, 6, 12, 5, 7, 12],
    "across one edge": [20, 10, 18],
    "over all chunks": [48],
    "many short": [3, 5, 2, 4, 1, 6, 3, 5, 2, 4, 1, 6, 3, 3],
    "one token each": [1] * 48,
    "long and single": [1, 22, 1, 1, 22, 1],
}
KV_HEADS = [4, 2, 1]
WINDOWS = [None, 1, 3, 30]
HEADS, HEAD_DIM = 4, 8


def _random(seqlens: list[int], kv_heads: int) -> tuple[list[Tensor], Tensor]:
    """Query, key, value and sinks, the same on all ranks; and a gradient of the result, [1, T, H, D]."""
    torch.manual_seed(0)
    heads, tokens = (HEADS, kv_heads, kv_heads), sum(seqlens)
    inputs = [torch.randn(1, h, tokens, HEAD_DIM, requires_grad=True) for h in heads]
    return [*inputs, torch.randn(HEADS, requires_grad=True)], torch.randn(1, tokens, HEADS, HEAD_DIM)


def _dense(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, seqlens: list[int], window: int | None) -> Tensor:
    """Attention with sinks as it is defined: one matrix of all tokens, and one column more."""
    sequence = torch.arange(len(seqlens)).repeat_interleave(torch.tensor(seqlens))
    distance = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
    visible = (sequence[:, None] == sequence) & (distance >= 0) & (distance < (window or len(sequence)))
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    logits = (query @ key.mT * HEAD_DIM**-0.5).masked_fill(~visible, -torch.inf)
    column = sinks[None, :, None, None].expand(-1, -1, len(sequence), 1)
    weights = torch.cat([logits, column], dim=3).softmax(dim=3)[..., :-1]
    return (weights @ value).transpose(1, 2)


def _equal(
    style: Style,
    seqlens: list[int],
    kv_heads: int,
    window: int | None,
    sinks: bool,
    *,
    kernel: Kernel,
    mesh: DeviceMesh,
) -> None:
    (*qkv, logits), grad = _random(seqlens, kv_heads)
    cu, layer = offsets_of(seqlens), AttentionLayer(index=0, scale=HEAD_DIM**-0.5, window=window)
    local = [local_part(x.detach(), 2, mesh).requires_grad_() for x in qkv]
    attend: Any = context_attention(cu, seqlens, kernel, mesh, style=style)
    if sinks:
        wanted = with_gradients(_dense(*qkv, logits, seqlens, window), grad, [*qkv, logits])
        out = attend(*local, replace(layer, sinks=logits))
        *found, of_sinks = with_gradients(out, local_part(grad, 1, mesh), [*local, logits])
        torch.testing.assert_close(sum_over(mesh, of_sinks), wanted.pop(), rtol=1e-5, atol=1e-5)
    else:
        layer = replace(layer, softcap=0.5 if kv_heads > 1 and window is None else None)
        wanted = with_gradients(packed_attention(cu, seqlens, "sdpa")(*qkv, layer), grad, qkv)
        found = with_gradients(attend(*local, layer), local_part(grad, 1, mesh), local)
    for one, whole, dim in zip(found, wanted, (1, 2, 2, 2), strict=True):
        torch.testing.assert_close(one, local_part(whole, dim, mesh), rtol=1e-5, atol=2e-6)


def _all_equal(kernel: Kernel, kv_heads: list[int]) -> None:
    with world_mesh() as mesh:
        for case in product(STYLES, LAYOUTS, kv_heads, WINDOWS, (False, True)):
            style, layout, *others = case
            try:
                _equal(style, LAYOUTS[layout], *others, kernel=kernel, mesh=mesh)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize(
    ("num_ranks", "kv_heads"),
    [pytest.param(2, KV_HEADS, marks=pytest.mark.slow), (4, [2]), pytest.param(4, [4, 1], marks=pytest.mark.slow)],
)
def test_equals_attention_on_one_rank(num_ranks: int, kv_heads: list[int]) -> None:
    run_ranks(num_ranks, _all_equal, "sdpa", kv_heads)


def test_the_varlen_kernel_is_told_what_each_rank_sees() -> None:
    """On a stand-in for the CUDA kernel, which tests/helpers/flash_on_cpu.py is."""
    run_ranks(4, _all_equal, "varlen", [2])


def _head_by_head(seqlens: list[int]) -> list[int]:
    """Exchanges of a forward, and of forward and backward together, with one key-value head at a time."""
    with world_mesh() as mesh:
        (*qkv, _), grad = _random(seqlens, kv_heads=2)
        local = [local_part(x.detach(), 2, mesh).requires_grad_() for x in qkv]
        attend = context_attention(offsets_of(seqlens), seqlens, "sdpa", mesh, style="all_gather")

        def run(*inputs: Tensor) -> Tensor:
            return attend(*inputs, AttentionLayer(index=0, scale=0.3))

        together = with_gradients(run(*local), local_part(grad, 1, mesh), local)
        context.HEAD_GROUP_BYTES = 1
        exchange, calls, counts = tensor_parallel.exchange_rows, [], []
        tensor_parallel.exchange_rows = lambda *arguments: (calls.append(1), exchange(*arguments))[1]
        out = run(*local)
        counts.append(len(calls))
        one_by_one = with_gradients(out, local_part(grad, 1, mesh), local)
        counts.append(len(calls))
        # As it is called in a layer that computes its activations again.
        again = checkpoint(run, *local, use_reentrant=False)
        torch.testing.assert_close(one_by_one, together)
        torch.testing.assert_close(with_gradients(again, local_part(grad, 1, mesh), local), together)
        return counts


def test_keys_of_one_head_at_a_time_are_borrowed_again_by_the_backward() -> None:
    # The first two ranks share a sequence; the others need nothing from anyone, and take part all the same.
    assert run_ranks(4, _head_by_head, [24, 12, 1, 11]) == [[2, 6]] * 4


def _gathered() -> None:
    with world_mesh() as mesh:
        whole = torch.arange(24.0).view(8, 3)
        weight = torch.linspace(-1, 1, 24).view(8, 3)
        local = local_part(whole, 0, mesh).clone().requires_grad_()
        gathered = gather_tokens(local, mesh)
        torch.testing.assert_close(gathered, whole)
        (gathered.square() * weight).sum().backward()
        assert local.grad is not None
        torch.testing.assert_close(local.grad, local_part(2 * whole * weight, 0, mesh))


def test_gathered_tokens_take_their_part_of_the_gradient() -> None:
    run_ranks(2, _gathered)


def test_heads_that_cannot_be_split_are_refused() -> None:
    assert list(context_problems(8, 8, 8, "ulysses")) == []
    assert list(context_problems(8, 2, 4, "ulysses")) == []  # each key-value head on two ranks
    assert list(context_problems(7, 5, 3, "all_gather")) == []
    (heads,) = context_problems(9, 2, 2, "ulysses")
    assert "parallel.cp = 2" in heads and "the model has 9" in heads and '"all_gather"' in heads
    (kv_heads,) = context_problems(12, 4, 6, "ulysses")
    assert "the model has 4" in kv_heads
    two_ranks: Any = SimpleNamespace(size=lambda: 2)
    x = torch.zeros(1, 3, 2, 8)
    attend = context_attention(offsets_of([4]), [4], "sdpa", two_ranks, style="ulysses")
    with pytest.raises(UserError, match=r"parallel\.cp = 2 .* the model has 3"):
        attend(x, x, x, AttentionLayer(index=0, scale=1.0))
