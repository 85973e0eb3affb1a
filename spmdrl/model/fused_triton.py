"""The functions behind `fused.py` as Triton kernels: each reads its inputs once and writes its results once.

Only the last dim of an input has to be contiguous; an input that is not so gets copied. Results are contiguous. Offsets
are 64 bits wide, because a micro-batch can have more than 2^31 elements.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # heads that a program of the rotation has at a time
_PROGRAMS = 1024  # that share a weight's gradient, whatever the device: sums are in the same order everywhere
_COLUMNS = 1024  # of a row that a program of the gated activation takes


def rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Compute `fused_plain.rotate`: x [T, H, D], weight [D] or None, cos and sin [T, D] give [T, H, D]."""
    x, cos, sin = _dense(x), _dense(cos), _dense(sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, half = x.shape[0] * x.shape[1], x.shape[2] // 2
    if num_rows:
        _rotate[(triton.cdiv(num_rows, _ROWS),)](
            x,
            x if weight is None else weight,
            cos,
            sin,
            out,
            *x.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            num_rows,
            x.shape[1],
            eps,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            ROWS=_ROWS,
            HAS_NORM=weight is not None,
        )
    return out


def rotate_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute `fused_plain.rotate_backward`: the gradients of x [T, H, D] and weight [D]."""
    grad, cos, sin = _dense(grad), _dense(cos), _dense(sin)
    heads = grad if x is None else _dense(x)
    grad_x = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    num_rows, half = grad.shape[0] * grad.shape[1], grad.shape[2] // 2
    num_programs = min(_PROGRAMS, triton.cdiv(num_rows, _ROWS))
    has_norm = x is not None
    parts = torch.empty(num_programs if has_norm else 0, grad.shape[2], dtype=torch.float32, device=grad.device)
    if num_rows:
        _rotate_backward[(num_programs,)](
            grad,
            heads,
            grad if weight is None else weight,
            cos,
            sin,
            grad_x,
            parts,
            *grad.stride()[:2],
            *heads.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            num_rows,
            grad.shape[1],
            eps,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            ROWS=_ROWS,
            HAS_NORM=has_norm,
        )
    return grad_x, None if weight is None else parts.sum(0).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `fused_plain.swiglu`: gate and up [..., I] give [..., I]."""
    gate_rows, up_rows = _rows(gate), _rows(up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        num_rows, num_columns = gate_rows.shape
        _swiglu[(num_rows, triton.cdiv(num_columns, _COLUMNS))](
            gate_rows,
            up_rows,
            out,
            gate_rows.stride(0),
            up_rows.stride(0),
            num_columns,
            COLUMNS=_COLUMNS,
        )
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fused_plain.swiglu_backward`: the gradients of gate and up."""
    grad_rows, gate_rows, up_rows = (_rows(x) for x in (grad, gate, up))
    grad_gate, grad_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    if grad.numel():
        num_rows, num_columns = gate_rows.shape
        _swiglu_backward[(num_rows, triton.cdiv(num_columns, _COLUMNS))](
            grad_rows,
            gate_rows,
            up_rows,
            grad_gate,
            grad_up,
            grad_rows.stride(0),
            gate_rows.stride(0),
            up_rows.stride(0),
            num_columns,
            COLUMNS=_COLUMNS,
        )
    return grad_gate, grad_up


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """View [..., I] as [N, I], or copy what has no such view."""
    return _dense(x.flatten(0, -2) if x.ndim > 1 else x[None])


@triton.jit
def _rotate(
    x,
    weight,
    cos,
    sin,
    out,
    x_token,
    x_head,
    cos_token,
    sin_token,
    num_rows,
    num_heads,
    eps,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < HALF)
    token, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
    place = token * x_token + head * x_head + column
    one = tl.load(x + place, inside, 0.0).to(tl.float32)
    other = tl.load(x + place + HALF, inside, 0.0).to(tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(one * one + other * other, 1, keep_dims=True) / (2 * HALF) + eps)
        one *= rstd * tl.load(weight + column, column < HALF, 0.0).to(tl.float32)
        other *= rstd * tl.load(weight + column + HALF, column < HALF, 0.0).to(tl.float32)
    c = tl.load(cos + token * cos_token + column, inside, 0.0).to(tl.float32)
    s = tl.load(sin + token * sin_token + column, inside, 0.0).to(tl.float32)
    place = row.to(tl.int64) * (2 * HALF) + column
    tl.store(out + place, (one * c - other * s).to(out.dtype.element_ty), inside)
    tl.store(out + place + HALF, (other * c + one * s).to(out.dtype.element_ty), inside)


@triton.jit
def _rotate_backward(
    grad,
    x,
    weight,
    cos,
    sin,
    grad_x,
    grad_weight,  # [programs, 2 HALF] float32, parts of a sum
    grad_token,
    grad_head,
    x_token,
    x_head,
    cos_token,
    sin_token,
    num_rows,
    num_heads,
    eps,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)[None, :]
    sum_one = tl.zeros((ROWS, BLOCK), tl.float32)
    sum_other = tl.zeros((ROWS, BLOCK), tl.float32)
    start = program * ROWS
    while start < num_rows:  # not range: Triton 3.6's interpreter and NumPy 2.4 disagree about its bounds
        row = start + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & (column < HALF)
        token, head = (row // num_heads).to(tl.int64), (row % num_heads).to(tl.int64)
        place = token * grad_token + head * grad_head + column
        g_one = tl.load(grad + place, inside, 0.0).to(tl.float32)
        g_other = tl.load(grad + place + HALF, inside, 0.0).to(tl.float32)
        c = tl.load(cos + token * cos_token + column, inside, 0.0).to(tl.float32)
        s = tl.load(sin + token * sin_token + column, inside, 0.0).to(tl.float32)
        # By the negative angle.
        one, other = g_one * c + g_other * s, g_other * c - g_one * s
        if HAS_NORM:
            place = token * x_token + head * x_head + column
            x_one = tl.load(x + place, inside, 0.0).to(tl.float32)
            x_other = tl.load(x + place + HALF, inside, 0.0).to(tl.float32)
            rstd = tl.rsqrt(tl.sum(x_one * x_one + x_other * x_other, 1, keep_dims=True) / (2 * HALF) + eps)
            x_one, x_other = x_one * rstd, x_other * rstd
            sum_one += one * x_one
            sum_other += other * x_other
            one *= tl.load(weight + column, column < HALF, 0.0).to(tl.float32)
            other *= tl.load(weight + column + HALF, column < HALF, 0.0).to(tl.float32)
            shared = tl.sum(one * x_one + other * x_other, 1, keep_dims=True) / (2 * HALF)
            one, other = (one - x_one * shared) * rstd, (other - x_other * shared) * rstd
        place = row.to(tl.int64) * (2 * HALF) + column
        tl.store(grad_x + place, one.to(grad_x.dtype.element_ty), inside)
        tl.store(grad_x + place + HALF, other.to(grad_x.dtype.element_ty), inside)
        start += num_programs * ROWS
    if HAS_NORM:
        place = program * (2 * HALF) + column
        tl.store(grad_weight + place, tl.sum(sum_one, 0, keep_dims=True), column < HALF)
        tl.store(grad_weight + place + HALF, tl.sum(sum_other, 0, keep_dims=True), column < HALF)


@triton.jit
def _swiglu(gate, up, out, gate_row, up_row, num_columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    g = tl.load(gate + row * gate_row + column, inside, 0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * num_columns + column, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), inside)


@triton.jit
def _swiglu_backward(
    grad, gate, up, grad_gate, grad_up, grad_row, gate_row, up_row, num_columns, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < num_columns
    d = tl.load(grad + row * grad_row + column, inside, 0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + column, inside, 0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, inside, 0.0).to(tl.float32)
    share = tl.sigmoid(g)
    place = row * num_columns + column
    tl.store(grad_gate + place, (d * u * share * (1 + g * (1 - share))).to(grad_gate.dtype.element_ty), inside)
    tl.store(grad_up + place, (d * g * share).to(grad_up.dtype.element_ty), inside)
