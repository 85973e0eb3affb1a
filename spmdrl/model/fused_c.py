"""The functions behind `fused.py` in C, for float32 on a CPU: each reads its inputs once and writes its results once.

Only the last dim of an input has to be contiguous; an input that is not so gets copied. Results are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.model.compiled import Function, threads_for

_ROWS_PER_PART = 64  # as in c/fused.c

_RMS_NORM = Function("fused", "rms_norm", "ppppiifi")
_RMS_NORM_BACKWARD = Function("fused", "rms_norm_backward", "pppppppiii")
_ROTATE = Function("fused", "rotate", "pppppiiiiiiifi")
_ROTATE_BACKWARD = Function("fused", "rotate_backward", "ppppppppiiiiiiiiifi")
_SWIGLU = Function("fused", "swiglu", "pppiiiii")
_SWIGLU_BACKWARD = Function("fused", "swiglu_backward", "pppppiiiiii")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `fused_plain.rms_norm`: x [..., D] and weight [D] give [..., D] and [..., 1]."""
    x, weight = x.contiguous(), weight.contiguous()
    width = x.shape[-1]
    out, rstd = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
    if x.numel():
        _RMS_NORM(x, weight, out, rstd, x.numel() // width, width, eps, threads_for(x.numel()))
    return out, rstd


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fused_plain.rms_norm_backward`: the gradients of x [..., D] and weight [D]."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
    parts = x.new_empty(_num_parts(num_rows), width)
    threads = threads_for(x.numel())
    _RMS_NORM_BACKWARD(grad, x, weight, rstd, grad_x, grad_weight, parts, num_rows, width, threads)
    return grad_x, grad_weight


def rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Compute `fused_plain.rotate`: x [T, H, D], weight [D] or None, cos and sin [T, D] give [T, H, D]."""
    x, cos, sin = _dense(x), _dense(cos), _dense(sin)
    out = x.new_empty(x.shape)
    sizes = (x.shape[0], x.shape[1], x.shape[2] // 2, *x.stride()[:2], cos.stride(0), sin.stride(0))
    _ROTATE(x, weight, cos, sin, out, *sizes, eps, threads_for(x.numel()))
    return out


def rotate_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute `fused_plain.rotate_backward`: the gradients of x [T, H, D] and weight [D]."""
    grad, cos, sin = _dense(grad), _dense(cos), _dense(sin)
    heads = grad if x is None else _dense(x)
    grad_x = grad.new_empty(grad.shape)
    grad_weight = None if weight is None else torch.zeros_like(weight)
    parts = None if weight is None else grad.new_empty(_num_parts(len(grad)), len(weight))
    strides = (*grad.stride()[:2], *heads.stride()[:2], cos.stride(0), sin.stride(0))
    sizes = (grad.shape[0], grad.shape[1], grad.shape[2] // 2)
    tensors = (grad, heads, weight, cos, sin, grad_x, grad_weight, parts)
    _ROTATE_BACKWARD(*tensors, *sizes, *strides, eps, threads_for(grad.numel()))
    return grad_x, grad_weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `fused_plain.swiglu`: gate and up [..., I] give [..., I]."""
    gate_rows, up_rows = _rows(gate), _rows(up)
    out = gate.new_empty(gate.shape)
    strides = (gate_rows.stride(0), up_rows.stride(0))
    _SWIGLU(gate_rows, up_rows, out, *gate_rows.shape, *strides, threads_for(out.numel()))
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fused_plain.swiglu_backward`: the gradients of gate and up."""
    rows = tuple(_rows(x) for x in (grad, gate, up))
    grad_gate, grad_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    strides = tuple(x.stride(0) for x in rows)
    _SWIGLU_BACKWARD(*rows, grad_gate, grad_up, *rows[0].shape, *strides, threads_for(grad.numel()))
    return grad_gate, grad_up


def _num_parts(num_rows: int) -> int:
    return -(-num_rows // _ROWS_PER_PART)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """View [..., I] as [N, I], or copy what has no such view."""
    return _dense(x.flatten(0, -2) if x.ndim > 1 else x[None])
