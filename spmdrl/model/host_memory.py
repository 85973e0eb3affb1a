"""Reusable host memory for tensors that move between device and host again and again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK_BYTES = 2**28
_ALIGNMENT = 512  # bytes; enough for every dtype, and the alignment of CUDA's own allocator


class HostBuffers:
    """Host memory by name. It is never freed: asking again for the same name and size returns the same memory."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._places: dict[str, Tensor] = {}
        self.num_bytes = 0

    def take(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Return memory [size] uint8 for each name."""
        new = {name: size for name, size in sizes.items() if not self._holds(name, size)}
        block_sizes, places = plan_blocks(new)
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for size in block_sizes]
        for name, (block, start) in places.items():
            self._places[name] = blocks[block][start : start + new[name]]
        self.num_bytes += sum(block_sizes)
        return {name: self._places[name] for name in sizes}

    def _holds(self, name: str, size: int) -> bool:
        return name in self._places and self._places[name].numel() == size


def plan_blocks(sizes: Mapping[str, int]) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Place tensors of these sizes in blocks: returns (bytes of each block, name -> (block, first byte)).

    Blocks are powers of two, because torch's pinned allocator rounds every allocation up to one: a buffer of 9 GiB
    would take 16. Tensors are placed from the largest to the smallest, each in the first block with room for it.
    """
    blocks: list[int] = []
    used: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    padded = {name: -(-size // _ALIGNMENT) * _ALIGNMENT for name, size in sizes.items()}
    left = sum(padded.values())
    for name in sorted(padded, key=lambda name: -padded[name]):
        size = padded[name]
        block = next((i for i, room in enumerate(blocks) if used[i] + size <= room), len(blocks))
        if block == len(blocks):
            blocks.append(1 << (max(size, min(left, BLOCK_BYTES)) - 1).bit_length())
            used.append(0)
        places[name] = (block, used[block])
        used[block] += size
        left -= size
    return blocks, places
