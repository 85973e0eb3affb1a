"""The functions behind `fused.py` in plain torch, for devices without Triton; they define what the kernels compute.

All of them compute in float32, or in float64 for float64, and round their results once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(mean(x^2) + eps) * weight, and the inverse root: [..., D] and [..., 1]."""
    wide = _wide(x)
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * weight).to(x.dtype), rstd


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [..., D] and weight [D]."""
    normalized, wide = _wide(x) * rstd, _wide(grad)
    grad_weight = (wide * normalized).flatten(0, -2).sum(0)
    wide = wide * weight
    shared = (wide * normalized).mean(-1, keepdim=True)
    return ((wide - normalized * shared) * rstd).to(x.dtype), grad_weight.to(weight.dtype)


def rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Normalize heads x [T, H, D], if there is a weight [D], and rotate them by the angles of cos and sin [T, D]."""
    heads = _wide(x) if weight is None else rms_norm(_wide(x), weight, eps)[0]
    return rotated(heads, cos, sin).to(x.dtype)


def rotate_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and weight; x is None where weight is: a rotation alone does not need it."""
    heads = rotated(_wide(grad), cos, -sin)
    if x is None or weight is None:
        return heads.to(grad.dtype), None
    _, rstd = rms_norm(_wide(x), weight, eps)
    grad_x, grad_weight = rms_norm_backward(heads, _wide(x), weight, rstd)
    return grad_x.to(x.dtype), grad_weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate / (1 + exp(-gate)) * up, all [..., I]."""
    wide = _wide(gate)
    return (wide * wide.sigmoid() * up).to(gate.dtype)


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    wide, wide_grad = _wide(gate), _wide(grad)
    share = wide.sigmoid()
    grad_gate = wide_grad * up * share * (1 + wide * (1 - share))
    return grad_gate.to(gate.dtype), (wide_grad * wide * share).to(up.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of heads x [T, H, D] by the angles of cos and sin, of which the first D / 2 are read."""
    half = x.shape[-1] // 2
    one, other = x[..., :half], x[..., half:]
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
