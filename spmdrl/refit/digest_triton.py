"""The sums of a digest on a device, for any number of tensors in one launch; `digest` has the formula.

Each byte is read once and nothing is written but the sums. They are integers, so the order of the additions, which
differs from launch to launch, does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmdrl.refit.digest import BLOCK_WORDS

_TILE_WORDS = 2048  # that a program reads at a time
_MAX_PROGRAMS = 256  # for one part of a weight


def sums(weights: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the two sums of each weight, [weights, 2] int64, given its words in parts [n] int64 that lie end to end.

    Modulo 2^64. Nothing waits for the device.
    """
    device = weights[0][0].device
    table: list[tuple[int, int, int, int]] = []  # of each part: address, words, its first word's place, its weight
    for number, parts in enumerate(weights):
        place = 0
        for part in parts:
            table.append((part.data_ptr(), len(part), place, number))
            place += len(part)
    longest = max(num_words for _, num_words, _, _ in table)
    found = torch.zeros(len(weights), 2, dtype=torch.int64, device=device)
    grid = (len(table), max(1, min(_MAX_PROGRAMS, triton.cdiv(longest, _TILE_WORDS))))
    _add_words[grid](torch.tensor(table).to(device), found, BLOCK=BLOCK_WORDS, TILE=_TILE_WORDS)
    return found


@triton.jit
def _add_words(table, found, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Add every N-th tile of one part to the two sums of its weight, N being the number of programs for a part."""
    row = table + 4 * tl.program_id(0)
    words = tl.load(row).to(tl.pointer_type(tl.int64))
    num_words, place, weight = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    whole = tl.zeros([TILE], dtype=tl.int64)
    upper = tl.zeros([TILE], dtype=tl.int64)
    first = tl.program_id(1).to(tl.int64) * TILE
    while first < num_words:
        i = first + tl.arange(0, TILE)
        word = tl.load(words + i, mask=i < num_words, other=0)
        at = place + i
        odd = (2 * (at % BLOCK) + 1) * (2 * BLOCK * (at // BLOCK) + 1)
        whole += odd * word
        upper += odd * (word >> 32)
        first += tl.num_programs(1).to(tl.int64) * TILE
    tl.atomic_add(found + 2 * weight, tl.sum(whole, 0))
    tl.atomic_add(found + 2 * weight + 1, tl.sum(upper, 0))
