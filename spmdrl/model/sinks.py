"""Attention sinks for kernels that know nothing of them.

A head's sink is one more score in each of its softmaxes, and has no value. A kernel that returns its output alone is
given the sink as a key; one that also returns its normalizer needs no other input.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def behind_a_sink(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with one more token in front and one more component: q [n, H, 1 + L, D + 1], k and v likewise.

    Of the component, q holds its head's entry of scores [H] and k holds 0, but 1 in the new token: each q's product
    with that token is the score. Its value is 0. So any kernel and its backward do sinks without knowing them.
    """
    column = scores.to(q.dtype)[:, None, None].expand(*q.shape[:3], 1)
    q = F.pad(torch.cat([q, column], dim=-1), (0, 0, 1, 0))
    sink = F.pad(k.new_ones(*k.shape[:2], 1, 1), (k.shape[-1], 0))
    return q, torch.cat([sink, F.pad(k, (0, 1))], dim=2), F.pad(v, (0, 1, 1, 0))


class NormalizerKernel(Protocol):
    """Attention that also returns the logarithm of each softmax's denominator, and its backward pass.

    q, out and grad are [T, H, D], k and v [keys, H, D]; lse is [H, T] float32.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v."""
        ...


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: NormalizerKernel) -> Tensor:
    """What `kernel` computes, [T, H, D], with the sinks [H] in its softmaxes; differentiable in all four tensors."""
    out: Tensor = _AttentionWithSinks.apply(q, k, v, sinks, kernel)
    return out


class _AttentionWithSinks(torch.autograd.Function):
    """A sink enlarges a softmax's denominator and nothing else, so the output only shrinks.

    Backward needs no other kernel either: it takes its probabilities from lse, p = exp(score - lse), and then
    d score = p * (grad . v - grad . out), which hold with the enlarged lse and the shrunk out. A sink's own value is 0:
    d sink = -p_sink * (grad . out).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: NormalizerKernel) -> Tensor:
        without, lse_without = kernel.forward(q, k, v)
        lse = torch.logaddexp(lse_without, sinks.float()[:, None])
        out = (without * (lse_without - lse).exp().t()[..., None]).to(without.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = ctx.kernel.backward(grad, q, k, v, out, lse)
        p_sink = (sinks.float()[:, None] - lse).exp()  # [H, T]
        grad_sinks = -(p_sink * (grad.float() * out.float()).sum(-1).t()).sum(1)
        return grad_q, grad_k, grad_v, grad_sinks.to(sinks.dtype), None
