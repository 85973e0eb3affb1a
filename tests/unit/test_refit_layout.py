"""The parts of ranks, joined, are the tensor that was cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from spmdrl.refit.bucket import ParameterLayout, Split

TP, SHARD = 2, 3


def part_of(whole: Tensor, splits: tuple[Split, ...], coordinate: tuple[int, ...]) -> Tensor:
    """What a rank holds, by torch's own chunks."""
    for cut, place in zip(splits, coordinate, strict=True):
        if cut.dim is not None:
            groups = whole.chunk(cut.groups, cut.dim)
            chunks = [list(group.chunk(cut.num_ranks, cut.dim)) for group in groups]
            empty = whole.narrow(cut.dim, 0, 0)
            whole = torch.cat([c[place] if place < len(c) else empty for c in chunks], cut.dim)
    return whole.contiguous()


CASES = {
    "rows": ((6, 4), (Split(SHARD, 0),)),
    "rows that do not come out even": ((7, 4), (Split(SHARD, 0),)),
    "more ranks than rows": ((2, 4), (Split(SHARD, 0),)),
    "rows, the same on two": ((6, 4), (Split(SHARD, 0), Split(TP, None))),
    "the same on two, rows": ((6, 4), (Split(TP, None), Split(SHARD, 0))),
    "rows and columns": ((6, 4), (Split(SHARD, 0), Split(TP, 1))),
    "uneven rows and columns": ((5, 4), (Split(SHARD, 0), Split(TP, 1))),
    "rows of rows": ((12, 4), (Split(SHARD, 0, groups=TP), Split(TP, 0))),
    "uneven rows of rows": ((8, 4), (Split(SHARD, 0, groups=TP), Split(TP, 0))),
    "few rows of rows": ((2, 4), (Split(SHARD, 0, groups=TP), Split(TP, 0))),
    "rows, then rows": ((12, 4), (Split(SHARD, 0), Split(TP, 0))),
    "two fused in each": ((3, 8, 5), (Split(SHARD, 0), Split(TP, 1, groups=2))),
    "two fused in each, uneven": ((4, 8, 5), (Split(SHARD, 0), Split(TP, 1, groups=2))),
    "one dimension": ((13,), (Split(SHARD, 0), Split(TP, None))),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_make_the_whole(case: str) -> None:
    shape, splits = CASES[case]
    whole = torch.arange(1, math.prod(shape) + 1).view(shape)
    layout = ParameterLayout(whole.shape, splits)
    coordinates = list(itertools.product(*(range(cut.num_ranks) for cut in splits)))
    parts = torch.zeros(len(coordinates), layout.max_numel, dtype=whole.dtype)
    for row, coordinate in zip(parts, coordinates, strict=True):
        part = part_of(whole, splits, coordinate).flatten()
        row[: part.numel()] = part
    joined = torch.zeros_like(whole)
    layout.join(joined, parts)
    assert torch.equal(joined, whole)


def test_equal_boxes_are_joined_by_one_copy() -> None:
    for case in ("rows", "rows, the same on two", "rows and columns", "rows of rows", "rows, then rows"):
        assert ParameterLayout(torch.Size(CASES[case][0]), CASES[case][1])._grid() is not None, case
