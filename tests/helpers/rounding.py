"""Bounds on what float32 may be off by, which hold for every order of its sums, and so on every processor.

A sum of n terms has at most n roundings, each of them of half a unit in the last place of a partial sum, and no partial
sum is larger than the sum of absolute values. Roundings are as often up as down, so that they add up to sqrt(n) of
them; SLACK is how many times as much is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

UNIT = torch.finfo(torch.float32).eps / 2
SLACK = 4.0


def sum_bound(magnitudes: Tensor, num_terms: int) -> Tensor:
    """Bound the error of sums of `num_terms` terms, whose absolute values add up to `magnitudes`."""
    return SLACK * math.sqrt(num_terms) * UNIT * magnitudes


def assert_within(found: Tensor, expected: Tensor, bound: Tensor) -> None:
    """Compare element by element; what is not finite is never within a bound."""
    errors = (found.double() - expected.double()).abs()
    assert bool((errors <= bound).all()), f"off by {float((errors / bound).max()):.3g} times the bound"


def causal_attention_bounds(
    q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, seqlens: Sequence[int], scale: float
) -> list[tuple[Tensor, Tensor]]:
    """Compute attention within sequences in float64: (value, bound) of the result and of the gradients of q, k and v.

    q and upstream [T, H, D], k and v [T, K, D]. A probability is off by what its score is off by, a sum over D.
    """
    kv_heads, groups, width = k.shape[1], q.shape[1] // k.shape[1], q.shape[2]
    parts: list[list[tuple[Tensor, Tensor]]] = []
    for tensors in zip(*(x.detach().double().split(list(seqlens)) for x in (q, k, v, upstream)), strict=True):
        heads = [x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], dim=0) for x in tensors]
        length = len(tensors[0])
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        probabilities = (heads[0] @ heads[1].mT * scale).masked_fill(hidden, -math.inf).softmax(-1)

        def flow(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, p: Tensor, sign: float) -> list[Tensor]:
            by_p = grad @ v.mT
            by_scores = p * (by_p + sign * (p * by_p).sum(-1, keepdim=True)) * scale
            by_group = [x.unflatten(0, (kv_heads, groups)).sum(1) for x in (by_scores.mT @ q, p.mT @ grad)]
            return [x.transpose(0, 1) for x in (p @ v, by_scores @ k, *by_group)]

        magnitudes = flow(*(x.abs() for x in heads), probabilities, 1.0)
        bounds = [
            sum_bound(sums, num_terms) + sum_bound(sums, 4 * width)
            for sums, num_terms in zip(magnitudes, [length, length, *2 * [length * groups]], strict=True)
        ]
        parts.append([*zip(flow(*heads, probabilities, -1.0), bounds, strict=True)])
    return [(torch.cat([x for x, _ in part]), torch.cat([x for _, x in part])) for part in zip(*parts, strict=True)]
