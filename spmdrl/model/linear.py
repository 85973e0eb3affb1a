"""Products of linear layers and of their gradients, by torch or, in float32 on a CPU, by the optional room for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmdrl.model.cpu_room import cpu_room


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x [..., D], weight [V, D] give [..., V]."""
    if x.device.type == "cpu" and (room := cpu_room()) is not None:
        return room.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a linear layer's weight: grad [N, V] and x [N, D] give grad^T x [V, D]."""
    if x.device.type == "cpu" and (room := cpu_room()) is not None:
        return room.outer(grad, x)
    return grad.t() @ x


def adds_products(device_type: str, dtype: torch.dtype) -> bool:
    """True where `add_product` has a kernel: 16 bits on CUDA."""
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key
    return dtype.itemsize == 2 and kernels("aten::addmm.dtype_out", device_type.upper())


def add_product(total: Tensor, one: Tensor, other: Tensor, *, is_first: bool = False) -> None:
    """Add one @ other, of 16 bits, to a float32 sum in one kernel, unrounded; the first may find anything in it."""
    torch.addmm(total, one, other, out_dtype=torch.float32, beta=0 if is_first else 1, out=total)


# Functions with the forward pass of one kernel and the backward pass of another, which differ only in rounding.
#
# Kernels that reproduce the bits of another program have no backward pass of their own. They need none: only forward
# results must agree to the bit.

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # x [N, D], weight [V, D], bias [V] give [N, V]
TensorFunction = Callable[..., Any]  # from tensors to a tensor, or to several


def with_backward_of(differentiable: TensorFunction, exact: TensorFunction, *inputs: Tensor) -> Any:
    """Return `exact(*inputs)` with the gradient of `differentiable(*inputs)`."""
    return _WithBackwardOf.apply(differentiable, exact, *inputs)


def linear_by(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` by `product`, with the gradient of the fast layers.

    x [..., D] and weight [V, D] give [..., V].
    """
    rows = x.flatten(0, -2)
    # A decode step has many small products, for which autograd would cost as much as the products themselves.
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    y: Tensor = _Linear.apply(product, rows, weight, bias) if needs_grad else product(rows, weight, bias)
    return y.view(*x.shape[:-1], -1)


class _WithBackwardOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, differentiable: TensorFunction, exact: TensorFunction, *inputs: Tensor) -> Any:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.differentiable = differentiable
        return exact(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = [x.detach() for x in ctx.saved_tensors]
        needed = ctx.needs_input_grad[2:]
        wanted = [x.requires_grad_() for x, is_needed in zip(inputs, needed, strict=True) if is_needed]
        with torch.enable_grad():
            outputs = ctx.differentiable(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        found = iter(torch.autograd.grad([output for output, _ in used], wanted, [grad for _, grad in used]))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


class _Linear(torch.autograd.Function):
    """y = x W^T + b, with dx = dy W and dW = dy^T x."""

    @staticmethod
    def forward(ctx: Any, product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            None,
            linear(grad, weight.t().contiguous()) if needs_x else None,
            outer(grad, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
