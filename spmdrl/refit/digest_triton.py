"""The numbers of a digest on a device, for any number of tensors in one launch; `digest` has the formula.

Each byte is read once, and nothing is written but four numbers a tensor. They are sums of integers, so the order of the
additions, which differs from launch to launch, does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS_AT_ONCE = 4
_MAX_PROGRAMS = 256  # for one part of a weight
_WARPS = 8


def sums(weights: Sequence[Sequence[Tensor]], *, row_words: int, table_rows: int) -> Tensor:
    """Return the four numbers of each weight, [weights, 4] int64, given its words in parts [n] int64.

    All parts of a weight but the last are whole tables. Nothing waits for the device.
    """
    described: list[tuple[int, int, int, int]] = []  # of each part: address, words, its first table, its weight
    for number, parts in enumerate(weights):
        table = 0
        for part in parts:
            described.append((part.data_ptr(), len(part), table, number))
            table += len(part) // (table_rows * row_words)
    longest = max(num_words for _, num_words, _, _ in described)
    device = weights[0][0].device
    found = torch.zeros(len(weights), 4, dtype=torch.int64, device=device)
    num_programs = max(1, min(_MAX_PROGRAMS, triton.cdiv(longest, table_rows * row_words)))
    _add_tables[(len(described), num_programs)](
        torch.tensor(described).to(device),
        found,
        ROW=row_words,
        ROWS=table_rows,
        AT_ONCE=_ROWS_AT_ONCE,
        num_warps=_WARPS,
    )
    return found


@triton.jit
def _add_tables(described, found, ROW: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add every N-th table of one part to the numbers of its weight, N being the number of programs for a part."""
    about = described + 4 * tl.program_id(0)
    words = tl.load(about).to(tl.pointer_type(tl.int64))
    num_words, first_table = tl.load(about + 1), tl.load(about + 2)
    numbers = found + 4 * tl.load(about + 3)
    column, row = tl.arange(0, ROW), tl.arange(0, AT_ONCE)
    table = tl.program_id(1).to(tl.int64)
    while table * ROWS * ROW < num_words:
        of_columns = tl.zeros([ROW], dtype=tl.int64)
        whole = tl.zeros([AT_ONCE], dtype=tl.int64)
        upper = tl.zeros([AT_ONCE], dtype=tl.int64)
        for first in range(0, ROWS, AT_ONCE):
            rows = table * ROWS + first + row
            place = rows[:, None] * ROW + column[None, :]
            tile = tl.load(words + place, mask=place < num_words, other=0)
            of_rows = tl.sum(tile, 1)
            odd = 2 * (first_table * ROWS + rows) + 1
            whole += odd * of_rows
            upper += odd * (of_rows >> 32)
            of_columns += tl.sum(tile, 0)
        odd_of_columns = 2 * ((first_table + table) * ROW + column) + 1
        tl.atomic_add(numbers, tl.sum(whole, 0))
        tl.atomic_add(numbers + 1, tl.sum(upper, 0))
        tl.atomic_add(numbers + 2, tl.sum(odd_of_columns * of_columns, 0))
        tl.atomic_add(numbers + 3, tl.sum(odd_of_columns * (of_columns >> 32), 0))
        table += tl.num_programs(1)
