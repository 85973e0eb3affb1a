"""The fast linear layer is the plain one, forward and backward, for any number of rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spmdrl.model.linear import _TILES, _tile_sizes, linear, outer


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 256, 300, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_equals_the_plain_one(rows: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    bias = torch.randn(24, requires_grad=True) if with_bias else None
    leaves = [torch.randn(1, rows, 40, requires_grad=True), torch.randn(24, 40, requires_grad=True)]
    leaves += [] if bias is None else [bias]
    weights = torch.randn(1, rows, 24)
    results = []
    for function in (linear, F.linear):
        y = function(leaves[0], leaves[1], bias)
        results.append([y, *torch.autograd.grad((y * weights).sum(), leaves)])
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(linear(leaves[0], leaves[1], bias), results[1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outer(weights[0], leaves[0][0]), weights[0].T @ leaves[0][0], rtol=1e-4, atol=1e-3)


def test_only_a_few_shapes_are_ever_used() -> None:
    for rows in range(1, 2000):
        sizes = _tile_sizes(rows)
        assert sum(sizes) == rows
        assert all(size in _TILES for size in sizes[:-1]) and sizes[-1] <= max(_TILES)
