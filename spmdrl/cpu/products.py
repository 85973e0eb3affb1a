"""float32 linear layers on a CPU, by the kernels that are fastest there.

torch multiplies float32 matrices with MKL. oneDNN, which torch ships as well, is up to 2.5 times as fast on some
processors and slower on others, so a run measures both (`calibration.py`) and says here which to use. Until then all is
MKL. oneDNN compiles a kernel for every shape it meets; rows are padded to a few sizes so that it meets few of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spmdrl.cpu.compiled import compiled_in_use
from spmdrl.model.fused import fused_layers

Kernel = Literal["mkl", "onednn"]

MIN_ROWS = 32  # for fewer, the cost of a call outweighs the faster kernel
MANY_ROWS = 256  # training has this many or more; decoding has fewer
_SIZES_PER_OCTAVE = 16  # to which rows are padded: 6 % more at most


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """The kernel of each kind of product."""

    few_rows: Kernel = "mkl"  # x W^T with MIN_ROWS rows or more
    many_rows: Kernel = "mkl"  # the same with MANY_ROWS or more
    weight_gradient: Kernel = "mkl"  # grad^T x with MANY_ROWS or more

    @property
    def is_plain(self) -> bool:
        """True when `torch.nn.functional.linear` does the same."""
        return self.few_rows == self.many_rows == self.weight_gradient == "mkl"


class _InUse:
    kernels = LinearKernels()


def use_kernels(kernels: LinearKernels) -> LinearKernels:
    """Use these kernels from now on, in the whole process; returns those that were used before."""
    before, _InUse.kernels = _InUse.kernels, kernels
    return before


def kernels_in_use() -> LinearKernels:
    """Return the kernels that this process uses now."""
    return _InUse.kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x [..., D], weight [V, D] give [..., V]."""
    if not _has_choice(x, weight):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y = _Linear.apply(rows, weight, bias)
    else:
        y = product(rows, weight, bias, _kernel_for(len(rows)))
    return y.view(*x.shape[:-1], -1)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a linear layer's weight: grad [N, V] and x [N, D] give grad^T x [V, D]."""
    is_measured = _has_choice(x, grad) and len(x) >= MANY_ROWS
    return weight_gradient(grad, x, _InUse.kernels.weight_gradient if is_measured else "mkl")


def layers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the model's linear layers, and the others where functions in C compute them, each with its new class.

    Fused in torch, norms, rotations and gates are no faster.
    """
    yield from ((module, _LinearLayer) for module in model.modules() if type(module) is nn.Linear)
    if compiled_in_use() and all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        yield from fused_layers(model)


class _LinearLayer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: Kernel) -> Tensor:
    """x W^T + b by a kernel: x [N, D], weight [V, D] of any strides give [N, V]."""
    if kernel == "mkl":
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(_padded(x), weight, bias, "none", [], "")
    return y[: len(x)]


def weight_gradient(grad: Tensor, x: Tensor, kernel: Kernel) -> Tensor:
    """grad^T x by a kernel: grad [N, V], x [N, D] give [V, D]."""
    if kernel == "mkl":
        return grad.t() @ x
    whole = len(x) - len(x) % row_step(len(x))  # what is left goes to MKL
    shaped = grad.new_empty(grad.shape[1], x.shape[1])  # only its shape is read
    parts = (part[:whole].contiguous().to_mkldnn() for part in (grad, x))
    total: Tensor = torch.ops.aten.mkldnn_linear_backward_weights(*parts, shaped, False)[0]
    return total if whole == len(x) else total.addmm_(grad[whole:].t(), x[whole:])


def _has_choice(x: Tensor, weight: Tensor) -> bool:
    # Cheapest tests first: every layer of every decode step comes here.
    return (
        x.numel() >= MIN_ROWS * x.shape[-1]
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not _InUse.kernels.is_plain
    )


def _kernel_for(num_rows: int) -> Kernel:
    return _InUse.kernels.many_rows if num_rows >= MANY_ROWS else _InUse.kernels.few_rows


def row_step(num_rows: int) -> int:
    """Return the distance of the sizes that oneDNN gets around a number of rows: powers of two."""
    return max(MIN_ROWS, (1 << num_rows.bit_length() - 1) // _SIZES_PER_OCTAVE)


def _padded(rows: Tensor) -> Tensor:
    """Add rows of zeros up to one of the sizes that oneDNN gets."""
    num_rows, step = len(rows), row_step(len(rows))
    if num_rows % step == 0:
        return rows
    padded = rows.new_empty(-(-num_rows // step) * step, *rows.shape[1:])
    padded[:num_rows] = rows
    padded[num_rows:] = 0.0
    return padded


class _Linear(torch.autograd.Function):
    """y = x W^T + b, with dx = dy W and dW = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias, _kernel_for(len(x)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t(), None, _kernel_for(len(grad))) if needs_x else None,
            outer(grad, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )
