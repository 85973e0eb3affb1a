"""Products of linear layers and of their gradients, by torch or, in float32 on a CPU, by the optional room for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
