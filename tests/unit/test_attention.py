"""Attention sinks on every path: equal to a softmax that is written out, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spmdrl.model.attention import attention_with_sinks, packed_attention
from spmdrl.rollout.torch_engine import _attend_to_cache

SCALE = 0.3
SEQLENS = [1, 3, 3, 9, 14]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def inputs() -> tuple[Tensor, ...]:
    """query, key, value and sinks for the sequences end to end."""
    torch.manual_seed(0)
    tokens = sum(SEQLENS)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return *(torch.randn(1, n, tokens, HEAD_DIM) for n in heads), torch.randn(HEADS)


def written_out(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None) -> Tensor:
    """[1, T, H, D], each sequence by itself: scores, the sink as one more, softmax, and the sink dropped."""
    outputs, groups = [], query.shape[1] // key.shape[1]
    for q, k, v in zip(*(x[0].split(SEQLENS, dim=1) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        length = q.shape[1]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (window or length))
        scores = (q @ k.transpose(1, 2) * SCALE).masked_fill(hidden, -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], dim=-1)
        outputs.append(scores.softmax(-1)[..., :-1] @ v)
    return torch.cat(outputs, dim=1).transpose(0, 1).unsqueeze(0)


def output_and_gradients(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    out = attend(*leaves)
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_sdpa_with_sinks(window: int | None) -> None:
    attend = packed_attention(torch.tensor([0, *SEQLENS]).cumsum(0).int(), SEQLENS, "sdpa")
    found = output_and_gradients(
        lambda q, k, v, sinks: attend(q, k, v, layer=0, scale=SCALE, window=window, sinks=sinks), inputs()
    )
    assert_all_close(found, output_and_gradients(lambda *leaves: written_out(*leaves, window), inputs()))


class CpuFlash:
    """torch's flash kernel for a CPU, for one sequence: like the CUDA kernels it returns each softmax's denominator."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        rows = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, True, scale=SCALE)
        return out[0].transpose(0, 1), lse[0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = [x.transpose(0, 1).unsqueeze(0) for x in (grad, q, k, v, out)]
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse.unsqueeze(0), 0.0, True, scale=SCALE
        )
        grad_q, grad_k, grad_v = (x[0].transpose(0, 1) for x in grads)
        return grad_q, grad_k, grad_v


def test_a_kernel_without_sinks_gets_them_from_its_normalizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SEQLENS", [sum(SEQLENS)])
    monkeypatch.setattr(f"{__name__}.KV_HEADS", HEADS)

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attention_with_sinks(q, k, v, sinks, CpuFlash()).unsqueeze(0)

    found = output_and_gradients(attend, inputs())
    assert_all_close(found, output_and_gradients(lambda *leaves: written_out(*leaves, None), inputs()))


def test_decoding_in_bfloat16_counts_the_sinks() -> None:
    query, key, value, sinks = inputs()
    rows = len(SEQLENS)
    keys, values = (x[0, :, :20].unsqueeze(0).expand(rows, -1, -1, -1) for x in (key, value))
    hidden = torch.arange(20) >= torch.tensor(SEQLENS)[:, None]
    arguments = (query[:, :, :rows], keys, values)
    exact = _attend_to_cache(*arguments, scale=SCALE, hidden=hidden, sinks=sinks)
    halves = [x.bfloat16() for x in arguments]
    rounded = _attend_to_cache(*halves, scale=SCALE, hidden=hidden, sinks=sinks.bfloat16())
    without = _attend_to_cache(*halves, scale=SCALE, hidden=hidden, sinks=None)
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0.02)
    assert (without.float() - exact).abs().max() > 0.2
