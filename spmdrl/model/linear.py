"""float32 linear layers on a CPU through oneDNN.

torch multiplies float32 matrices with MKL, which on processors that are not Intel's does not use AVX-512: oneDNN, which
torch ships as well, was 1.7 to 2.5 times as fast there (benchmarks/results). Small products stay with MKL, whose
calls cost less. The results are float32 either way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_FEW_ROWS = 64  # below this the cost of a call outweighs the faster kernel
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x [..., D], weight [V, D] give [..., V]."""
    if not _can_use_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _OneDnnLinear.apply(x, weight, bias)
    return _onednn(x, weight, bias)


def use_fast_linears(model: nn.Module) -> None:
    """Let the model's linear layers use `linear`. Call it before the model is sharded."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _can_use_onednn(x: Tensor, weight: Tensor) -> bool:
    # Cheapest test first: a decode step asks this for every layer.
    many_rows = x.numel() >= _FEW_ROWS * x.shape[-1]
    return many_rows and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and _HAS_ONEDNN


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    """y = x W^T + b, with dx = dy W and dW = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            _onednn(grad, weight.t().contiguous()) if needs_x else None,
            _onednn(rows.t(), x.flatten(0, -2).t()) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
