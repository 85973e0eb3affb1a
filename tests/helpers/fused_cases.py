"""Cases of the fused operations, beside transformers' operations that they replace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from spmdrl.model import fused

EPS = 1e-6
HALF = (torch.bfloat16, torch.float16)
Operation = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """An operation on inputs of a shape; `strided` ones are not contiguous."""

    name: str
    shape: tuple[int, ...]  # of the result
    strided: bool = False

    @property
    def fused(self) -> Operation:
        """The operation of `spmdrl.model.fused`."""
        return {
            "norm": lambda x, weight: fused.rms_norm(x, weight, EPS),
            "rotation": lambda x, angles: fused.rotate(x, *_tables(angles)),
            "head norm": lambda x, weight, angles: fused.rotate(x, *_tables(angles), weight, EPS),
            "swiglu": fused.swiglu,
        }[self.name]

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.shape))}{' strided' if self.strided else ''}"


CASES = [
    *(Case("norm", shape) for shape in ((1, 7, 48), (5, 1))),
    *(
        Case(name, shape, strided)
        for name in ("rotation", "head norm")
        for shape, strided in (((13, 3, 16), False), ((1, 1, 2), False), ((7, 4, 40), True), ((37, 5, 128), False))
    ),
    *(Case("swiglu", *case) for case in (((5,), False), ((3, 5), False), ((2, 7, 80), False), ((9, 2051), True))),
]
EMPTY = [Case("rotation", (0, 2, 8)), Case("head norm", (0, 2, 8)), Case("swiglu", (0, 6)), Case("swiglu", (3, 0))]


def eager(case: Case) -> Operation:
    """The operations of transformers, one after the other."""
    return {"norm": _norm, "rotation": _rotation, "head norm": _head_norm, "swiglu": _swiglu}[case.name]


def inputs_of(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Random inputs of the operation. Angles [T, D] come last."""
    generator = torch.Generator().manual_seed(sum(case.shape))

    def noise(*shape: int) -> Tensor:
        if not case.strided:
            return torch.randn(shape, generator=generator, dtype=dtype)
        # Rows of a wider tensor; those of heads also in another order.
        wider = torch.randn(*reversed(shape[:-1]), shape[-1] + 3, generator=generator, dtype=dtype)
        return wider.transpose(0, -2)[..., 1:-2]

    weight = 1 + torch.randn(case.shape[-1], generator=generator, dtype=dtype) / 4
    if case.name == "norm":
        return [noise(*case.shape), weight]
    if case.name == "swiglu":
        return [noise(*case.shape), noise(*case.shape)]
    tokens, _, width = case.shape
    angles = torch.randn(tokens, math.ceil(width / 2), generator=generator, dtype=dtype).repeat(1, 2)
    return [noise(*case.shape), *([weight] if case.name == "head norm" else []), angles]


def gradients(operation: Operation, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The result of the operation, and the gradients of its inputs except angles."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    result = operation(*leaves)
    assert result.is_contiguous()
    upstream = torch.linspace(-1, 1, result.numel() + 1)[1:].sin().view(result.shape).to(result)
    if result.ndim > 1:  # strided as attention hands it over
        upstream = upstream.transpose(0, 1).contiguous().transpose(0, 1)
    result.backward(upstream)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _tables(angles: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return angles.cos(), angles.sin()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _rotation(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = _tables(angles)
    rotated, _ = apply_rotary_pos_emb(x, x, cos, sin)
    return rotated.contiguous()


def _head_norm(x: Tensor, weight: Tensor, angles: Tensor) -> Tensor:
    return _rotation(_norm(x, weight), angles)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
