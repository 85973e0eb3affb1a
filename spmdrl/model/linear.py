"""float32 linear layers on a CPU through oneDNN.

torch multiplies float32 matrices with MKL, which does not use AVX-512 on processors of other makers than Intel. oneDNN,
which torch ships as well, was 1.7 to 2.5 times as fast there. It caches a kernel for every shape it meets, so it gets
only tiles of a few sizes: with the lengths of packed batches as they come, host memory grew by 4 to 7 MiB a step. The
remaining rows go to MKL, whose calls cost less. The results are float32 either way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_TILES = (512, 128, 64)  # rows; for fewer, the cost of a call outweighs the faster kernel
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x [..., D], weight [V, D] give [..., V]."""
    if not _can_use_onednn(x, weight):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y = _TiledLinear.apply(rows, weight, bias)
    else:
        y = _tiled(rows, weight, bias)
    return y.view(*x.shape[:-1], -1)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a linear layer's weight: grad [N, V] and x [N, D] give grad^T x [V, D]."""
    return _tiled_outer(grad, x) if _can_use_onednn(x, grad) else grad.t() @ x


def use_fast_linears(model: nn.Module) -> None:
    """Make the model's linear layers use `linear`. Call it before the model is sharded."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _Linear


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def _can_use_onednn(x: Tensor, weight: Tensor) -> bool:
    # Cheapest test first: every layer of every decode step comes here.
    many_rows = x.numel() >= _TILES[-1] * x.shape[-1]
    return many_rows and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and _HAS_ONEDNN


def _tile_sizes(num_rows: int) -> list[int]:
    """Split rows into as many large tiles as fit, then smaller ones, then the rest."""
    sizes = []
    for tile in _TILES:
        count, num_rows = divmod(num_rows, tile)
        sizes += [tile] * count
    return sizes + [num_rows] * (num_rows > 0)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, *, is_tile: bool) -> Tensor:
    """x W^T + b of one tile, or of the remaining rows."""
    if is_tile:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _tiled(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, D], weight [V, D] give [N, V]."""
    parts = x.split(_tile_sizes(x.shape[0]))
    products = [_product(part, weight, bias, is_tile=part.shape[0] in _TILES) for part in parts]
    return products[0] if len(products) == 1 else torch.cat(products)


def _tiled_outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x of grad [N, V] and x [N, D], summed tile by tile: [V, D]."""
    sizes = _tile_sizes(x.shape[0])
    total = grad.new_zeros(grad.shape[1], x.shape[1])
    for grad_part, x_part in zip(grad.split(sizes), x.split(sizes), strict=True):
        total += _product(grad_part.t(), x_part.t(), None, is_tile=x_part.shape[0] in _TILES)
    return total


class _TiledLinear(torch.autograd.Function):
    """y = x W^T + b, with dx = dy W and dW = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _tiled(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _tiled(grad, weight.t().contiguous()) if needs_x else None,
            _tiled_outer(grad, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
