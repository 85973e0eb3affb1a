"""`logits_tile` in Triton, for CUDA: each operation reads the tile once, and computes in float32 whatever its dtype.

Bytes that torch and these kernels read and write for each logit of a bfloat16 tile, counted from the code, without the
matrix products. In parentheses with a temperature other than 1, which torch divides by in a pass of its own.

    summary                   torch 54 (62)   here 2
    gradient                  torch 36 (44)   here 4
    gradient, with entropy    torch 64 (72)   here 4

torch's passes for a summary are the float32 copy (6), clamp (8), maximum (4), difference (8), exp (8), sum (4),
product (12) and sum (4); for a gradient, the float32 copy (6), difference (8), exp (8), product (8) and the bfloat16
copy (6), and with the entropy a clamp (8), another sum (8) and product (12).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmdrl.model import logits_tile
from spmdrl.model.logits_tile import GradientTerms, Scale

_FORBIDDEN = tl.constexpr(logits_tile.FORBIDDEN)
_BLOCK = 4096  # logits of one token that a program holds at a time, 16 in each of its threads
_WARPS = 8


def summary(logits: Tensor, targets: Tensor, start: int, scale: Scale, before: Tensor | None = None) -> Tensor:
    """`logits_tile.summary`; leaves the logits as they are."""
    num_tokens, width = logits.shape
    assert logits.stride(1) == targets.stride(0) == 1, "rows are read as they lie in memory"
    after = torch.empty(4, num_tokens, dtype=torch.float32, device=logits.device)
    _summary[(num_tokens,)](
        logits,
        logits.stride(0),
        width,
        targets,
        start,
        *scale,
        None if before is None else before.contiguous(),
        after,
        num_tokens,
        IS_SCALED=scale.temperature != 1.0,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return after


def gradient(logits: Tensor, targets: Tensor, start: int, scale: Scale, terms: GradientTerms) -> Tensor:
    """`logits_tile.gradient`; overwrites the logits."""
    num_tokens, width = logits.shape
    read = (logits, targets, *terms)
    assert all(x.stride(-1) == 1 for x in read if x is not None), "rows are read as they lie in memory"
    _gradient[(num_tokens, triton.cdiv(width, _BLOCK))](
        logits,
        logits.stride(0),
        width,
        targets,
        start,
        *scale,
        *terms,
        IS_SCALED=scale.temperature != 1.0,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
    return logits


@triton.jit
def _tanh(x):
    """tanh by an exponential that cannot overflow, and near 0, where that loses digits, by its series."""
    exp = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - exp) / (1.0 + exp)
    return tl.where(tl.abs(x) < 0.04, x * (1.0 + x * x * (-1.0 / 3.0 + x * x * (2.0 / 15.0))), far)


@triton.jit
def _scaled(logits, temperature, softcap, IS_SCALED: tl.constexpr):
    z = logits.to(tl.float32)
    if softcap is not None:
        z = softcap * _tanh(tl.div_rn(z, softcap))
    return tl.div_rn(z, temperature) if IS_SCALED else z


@triton.jit
def _summary(
    logits,
    stride,
    width,
    targets,
    start,
    temperature,
    softcap,
    before,
    after,
    num_tokens,
    IS_SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each token: reads its row, and scales its sums down when it finds a larger logit."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    place = tl.load(targets + token) - start
    is_inside = (place >= 0) & (place < width)
    target = _scaled(tl.load(row + place, mask=is_inside, other=0.0), temperature, softcap, IS_SCALED)
    largest = tl.full((), _FORBIDDEN, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    weighted = tl.full((), 0.0, tl.float32)
    if before is not None:
        largest = tl.load(before + token)
        total = tl.load(before + num_tokens + token)
        weighted = tl.load(before + 2 * num_tokens + token)
        target += tl.load(before + 3 * num_tokens + token)
    first = 0
    while first < width:  # in the interpreter, range needs NumPy below 2.4
        columns = first + tl.arange(0, BLOCK)
        is_column = columns < width
        z = _scaled(tl.load(row + columns, mask=is_column, other=float("-inf")), temperature, softcap, IS_SCALED)
        z = tl.where(z < _FORBIDDEN, _FORBIDDEN, z)  # tl.maximum would drop nan
        top = tl.maximum(largest, tl.max(z, 0))
        exp = tl.where(is_column, tl.exp(z - top), 0.0)
        below = largest - top
        scale = tl.exp(below)
        weighted = scale * (weighted + below * total) + tl.sum(exp * (z - top), 0)
        total = scale * total + tl.sum(exp, 0)
        largest = top
        first += BLOCK
    tl.store(after + token, largest)
    tl.store(after + num_tokens + token, total)
    tl.store(after + 2 * num_tokens + token, weighted)
    tl.store(after + 3 * num_tokens + token, target)


@triton.jit
def _gradient(
    logits,
    stride,
    width,
    targets,
    start,
    temperature,
    softcap,
    log_normalizer,
    entropy,
    by_logprob,
    by_entropy,
    IS_SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each block of a token's row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < width
    cells = logits + token * stride + columns
    slope = tl.load(by_logprob + token)
    z = _scaled(tl.load(cells, mask=is_column, other=0.0), temperature, softcap, IS_SCALED)
    log_p = z - tl.load(log_normalizer + token)
    log_p = tl.where(log_p < _FORBIDDEN, _FORBIDDEN, log_p)
    factor = -slope
    if by_entropy is not None:
        by_entropy_here = tl.load(by_entropy + token)
        factor = -(slope + by_entropy_here * tl.load(entropy + token)) - by_entropy_here * log_p
    grad = factor * tl.exp(log_p) + tl.where(columns == tl.load(targets + token) - start, slope, 0.0)
    if softcap is not None:
        tanh = z * (temperature / softcap)
        grad *= 1.0 - tanh * tanh
    tl.store(cells, grad.to(logits.dtype.element_ty), mask=is_column)
