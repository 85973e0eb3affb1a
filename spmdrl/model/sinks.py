"""Attention sinks for kernels that do not implement them.

A head's sink is one more logit in each of its softmaxes. It takes probability away from the keys and has no value of
its own. A kernel that returns only its output is given the sink as one more key. For a kernel that also returns its
normalizer, the output is rescaled afterwards.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def prepend_sink(q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add the sink as a first token and one more component: q [n, H, 1 + L, D + 1], k and v likewise.

    In the new component q holds its head's entry of scores [H], and k holds 1 in the new token and 0 elsewhere, so that
    the product of any query with that token is the score. The token's value is 0. Any kernel and its backward pass
    then compute sinks without knowing it.
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
    """Attention [T, H, D] by `kernel` with sinks [H] in its softmaxes; differentiable in all four tensors."""
    out: Tensor = _AttentionWithSinks.apply(q, k, v, sinks, kernel)
    return out


class _AttentionWithSinks(torch.autograd.Function):
    """Shrink the output of attention without sinks: a sink only enlarges the denominator of its softmax.

    The kernel's own backward pass works unchanged. It computes p = exp(score - lse) and
    d score = p * (grad . v - grad . out), which stay true with the enlarged lse and the smaller out. The value of a
    sink is 0, hence d sink = -p_sink * (grad . out).
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
